"""The commands around `automesh serve`."""
