"""The entry points: command line, HTTP server, offline engine, worker processes."""
