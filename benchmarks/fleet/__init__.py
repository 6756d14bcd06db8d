"""How well are compiles spread over the hosts of a search, and what does the spreading cost?"""
