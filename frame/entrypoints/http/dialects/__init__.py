"""APIs of other servers: Ollama, Cohere, TEI, SageMaker, and routes of vLLM and SGLang."""
