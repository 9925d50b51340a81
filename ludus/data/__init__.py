"""Files of recorded episodes: ``.npz`` and local Minari datasets."""
