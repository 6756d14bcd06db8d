"""The distribution `jax-automesh-pipeline`; this file gives its tests a name of their own."""
