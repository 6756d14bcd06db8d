"""Scripts without a `build` function: run unmodified up to their step, on a mesh of ours."""
