"""Manifest of the in-tree HTTP extensions, the APIs: records only. Must not import the plugins.

A target is the module of `frame.entrypoints.http` that holds the API's routes.
"""

from __future__ import annotations

from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_http_extensions(registry: KindRegistry) -> None:
    """Add the in-tree APIs."""
    here, dialects = "frame.entrypoints.http", "frame.entrypoints.http.dialects"
    openai = f"{here}.openai.completions:OpenAIRoutes"
    registry.add("openai", openai, summary="The OpenAI API: chat, responses, embeddings, audio, batches.")
    registry.add("anthropic", f"{dialects}.anthropic:AnthropicRoutes", summary="The Anthropic Messages API.")
    registry.add("native", f"{here}.native.generate:NativeRoutes", summary="/generate, /tokenize, reranking, scoring and classification.")
    registry.add("vllm", f"{dialects}.vllm:VllmRoutes", summary="Further routes of vLLM: batched chat, render, pooling, version, load.")
    registry.add("sglang", f"{dialects}.sglang:SglangRoutes", summary="Further routes of SGLang: model information and output parsers.")
    registry.add("cohere", f"{dialects}.cohere:CohereRoutes", summary="Cohere's /v2/embed.")
    registry.add("tei", f"{dialects}.tei:TeiRoutes", summary="/embed and /rerank of text-embeddings-inference.")
    registry.add("ollama", f"{dialects}.ollama:OllamaRoutes", summary="The Ollama API.")
    registry.add("sagemaker", f"{dialects}.sagemaker:SageMakerRoutes", summary="The routes of a SageMaker container.")
