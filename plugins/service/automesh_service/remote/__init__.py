"""What commands and training scripts say to a service: `automesh submit`, rules by their URL."""
