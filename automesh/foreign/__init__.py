"""Whether a file may hold what another account has written, and how such a database is read."""
