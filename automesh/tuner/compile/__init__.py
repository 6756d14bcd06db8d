"""The compile rung, which sends plans through the compiler."""
