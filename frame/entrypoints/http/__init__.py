"""The HTTP server: OpenAI, native and admin routes."""
