"""Stands in for `gcsfs` where a script imports it and keeps its files on the disk."""
