"""How each framework says a mesh: written from a rule, and read back as one."""
