"""Stands in for `clu`, which imports TensorFlow to write summaries."""
