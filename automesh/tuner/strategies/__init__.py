"""The kinds of search, by what is done with a plan: run it here, compile it for absent devices."""
