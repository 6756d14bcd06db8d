"""Whether a file may hold what another account has written, and how such databases are opened."""
