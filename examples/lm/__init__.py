"""What the three example scripts share: the text, a decoder, optimizers and the training loop."""
