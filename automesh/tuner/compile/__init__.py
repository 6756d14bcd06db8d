"""The compile rung: plans through the compiler."""
