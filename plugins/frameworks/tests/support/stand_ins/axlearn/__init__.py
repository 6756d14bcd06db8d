"""A stand-in for AXLearn, and no AXLearn: a few lines with the names, forms and errors that
`automesh_frameworks.steps.axlearn` uses of it, for tests where it is not installed."""
