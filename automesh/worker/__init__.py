"""Worker processes that run user code, and the pool that survives their failures."""
