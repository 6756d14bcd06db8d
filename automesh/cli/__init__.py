"""The command line: a module for each command, registered in `app`."""
