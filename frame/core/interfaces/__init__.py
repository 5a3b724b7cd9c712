"""The interfaces that the core calls, one page per plugin kind, and the data that crosses them.
Those that it never calls are in `frame.interfaces`.

Importing these pages imports no torch, so that capability records can be read without a GPU.
"""
