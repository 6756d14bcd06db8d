"""Clients of a service: `automesh submit`, agents, and rules that are loaded by their URL."""
