"""What other distributions add to automesh: found by entry points, loaded when it is used."""
