"""Tuned settings: one TOML file per environment, one table per agent."""
