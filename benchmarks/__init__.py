"""Speed against Stable-Baselines3, side by side: ``make bench``."""
