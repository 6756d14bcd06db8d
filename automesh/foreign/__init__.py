"""Recognizes files that another account may have written, and opens such databases safely."""
