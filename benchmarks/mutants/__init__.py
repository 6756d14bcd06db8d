"""How many small faults, put into the code at random, do the tests of the ten-minute run find?"""
