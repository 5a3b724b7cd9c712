"""The interfaces that plugins implement, one page per plugin kind, and the data that crosses them.

Importing these pages imports no torch, so that capability records can be read without a GPU.
"""
