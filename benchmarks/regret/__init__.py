"""How much slower than the best mesh is what a search finds, and what does finding it cost?"""
