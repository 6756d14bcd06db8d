"""What `automesh lint` prints: as text, JSON and SARIF."""
