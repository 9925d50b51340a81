"""Tuned settings as data: one TOML file per environment, one table per agent."""
