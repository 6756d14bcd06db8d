"""The measure rung: races, fresh processes and the verdict."""
