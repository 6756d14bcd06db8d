"""Stands in for TensorFlow where a script imports it to read data only: it has nothing."""
