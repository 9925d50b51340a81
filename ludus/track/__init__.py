"""A run on disk and on the screen: its folder, settings, metrics, checkpoints, console and videos."""
