"""Steps that differ in kind, each small: what estimates are compared on."""
