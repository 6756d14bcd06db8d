"""Rewrites of the graph, as the partitioner and the platforms' compilers do them."""
