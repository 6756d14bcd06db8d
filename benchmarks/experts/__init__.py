"""Do the meshes that experts published stand among the best that automesh finds?"""
