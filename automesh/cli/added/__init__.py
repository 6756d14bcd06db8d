"""Commands that plug-ins add."""
