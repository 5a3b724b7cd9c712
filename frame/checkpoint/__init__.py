"""Reads the files of a checkpoint besides its weights, without torch."""
