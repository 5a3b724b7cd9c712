"""The minimal core: scheduling, caching, batching and the engine loop.

Knows no plugin by name, no pluggy and no HTTP. The composition root
(`frame.entrypoints.processes.build_engine`) hands it the chosen plugins.
"""
