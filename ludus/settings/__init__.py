"""Typed settings: defaults, presets, files and flags, and the origin of each value."""
