"""Parts of ``deepwell.Trainer``: data and their position, random state, checkpoints, progress."""
