"""Which plans a search may try: axes, constraints and knobs -> legal plans, and why not others."""
