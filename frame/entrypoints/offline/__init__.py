"""The Python API: the engine in this process, and a client of a server with the same methods."""
