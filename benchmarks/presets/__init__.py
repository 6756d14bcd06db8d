"""Which mesh should MaxText's public models have, and how do published ones compare?"""
