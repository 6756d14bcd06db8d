"""Changes libraries when a script imports them, so that they use the files of the private layer."""
