"""Preprocessing of observations and actions, and normalization."""
