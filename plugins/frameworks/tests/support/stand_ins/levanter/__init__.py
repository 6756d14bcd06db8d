"""A stand-in for Levanter: a few lines with the names, forms and errors that
`automesh_frameworks.steps.levanter` uses of marin-levanter 0.2.227, on the real Haliax and Equinox,
for tests where Levanter is not installed. `plugins/frameworks/tests/steps/test_real_levanter.py`
(long) runs the real one."""
