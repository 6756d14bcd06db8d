"""The output of `automesh lint`: as text, JSON and SARIF."""
