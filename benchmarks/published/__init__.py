"""Do predictions for devices that are not here order published measurements as they came out?"""
