"""What does an axis over DCN cost, and are the losses of two processes those of one?"""
