"""Loading: a checkpoint's configuration and weights."""
