"""Downloads of models from a hub."""
