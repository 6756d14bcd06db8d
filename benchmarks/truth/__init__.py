"""What the compiler makes of the examples, mesh by mesh."""
