"""Tests of `automesh.program.kernels`."""
