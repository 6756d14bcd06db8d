"""Optuna's storages, read so that one damaged record does not block all others."""
