"""Search spaces: axes, constraints and knobs -> legal plans, and why others are not."""
