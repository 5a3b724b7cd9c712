"""The engine's asyncio client: submits requests, routes their tokens, recovers them after a
crash."""
