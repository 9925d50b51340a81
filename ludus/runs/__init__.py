"""A run on disk: its folder, checkpoints, resume, the loaded policy and reports."""
