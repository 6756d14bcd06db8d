"""Rules that give the dimensions of the results of each operation from those of its operands."""
