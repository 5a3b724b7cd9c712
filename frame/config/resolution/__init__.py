"""The parts of `frame.config.resolve`, one for each group of settings."""
