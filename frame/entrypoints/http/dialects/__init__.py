"""Dialects of other servers and services: Ollama, Cohere, TEI, SageMaker, and routes of vLLM and SGLang."""
