"""Do estimates and compiled predictions agree with what one attached accelerator takes?"""
