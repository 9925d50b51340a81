"""Typed settings: their defaults, presets and files, and where each value came from."""
