"""What every plugin family implements, one page each.

Importing these pages imports no torch: capability records are read without a GPU and without loading a kernel.
"""
