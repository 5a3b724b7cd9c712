"""Trains frame-tiny, the embedded model: `python -m scripts.train_frame_tiny` runs every step."""
