"""The options of `automesh search`: one record each, from which all that repeats them is made."""
