"""Containers hold all application state and run the loop; ``build`` makes them from settings."""
