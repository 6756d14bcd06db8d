"""What single operations send where their dimensions are split: estimated and compiled."""
