"""Environments: making them by name, their spaces as named arrays, toys to learn from, and a check of a user's own."""
