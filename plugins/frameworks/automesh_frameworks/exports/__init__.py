"""The settings of each framework for a mesh: written from a rule, and read back as one."""
