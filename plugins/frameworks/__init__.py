"""The distribution `jax-automesh-frameworks`; this file gives its tests a name of their own."""
