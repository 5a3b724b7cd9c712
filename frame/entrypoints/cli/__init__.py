"""The `frame` command line."""
