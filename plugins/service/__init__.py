"""The distribution `jax-automesh-service`; this file gives its tests a name of their own."""
