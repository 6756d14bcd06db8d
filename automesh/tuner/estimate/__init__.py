"""The estimate rung: legal plans get a price."""
