"""The child process that runs user code, and the pool that survives its death."""
