"""Classes of dimensions beside the logical axis names of the authors of models."""
