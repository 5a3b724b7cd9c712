"""Training of frame-tiny, the embedded model: `python -m scripts.train_frame_tiny` does every step."""
