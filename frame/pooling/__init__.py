"""Pooling models: the runner of models that embed or classify, and what makes its vectors."""
