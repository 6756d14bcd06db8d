"""The estimate rung, which predicts the step time of legal plans."""
