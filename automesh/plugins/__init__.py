"""The parts that other distributions add to automesh: found by entry points, loaded when they are
used."""
