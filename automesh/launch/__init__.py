"""Runs jobs and gangs of processes on other hosts, by an agent on each host."""
