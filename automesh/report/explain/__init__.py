"""Explanations: data, sentences, table and JSON."""
