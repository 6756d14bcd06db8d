"""The kinds of search: one runs plans here, the other compiles them for absent devices."""
