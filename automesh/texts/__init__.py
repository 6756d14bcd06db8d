"""Checks texts of users and others: refuses some, hides secrets, makes them safe for terminals."""
