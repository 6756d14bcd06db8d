"""What the three example scripts share: the text, a decoder, AdamW and the training loop."""
