"""The native API, and routes for embeddings, classes and relevance."""
