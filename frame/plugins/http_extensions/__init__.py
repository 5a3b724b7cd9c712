"""Manifest of the in-tree HTTP extensions, the APIs: records only. Must not import the plugins.

A plugin of this family returns routers of `frame.entrypoints.http`, whose handlers are parts of the
server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_http_extensions(registry: KindRegistry) -> None:
    """Add the in-tree APIs."""
    here = "frame.plugins.http_extensions"
    registry.add("openai", f"{here}.openai:OpenAIRoutes", summary="The OpenAI API: chat, responses, embeddings, audio, batches.")
    registry.add("anthropic", f"{here}.anthropic:AnthropicRoutes", summary="The Anthropic Messages API.")
    registry.add("native", f"{here}.native:NativeRoutes", summary="/generate, /tokenize, reranking, scoring and classification.")
    registry.add("vllm", f"{here}.vllm:VllmRoutes", summary="Further routes of vLLM: batched chat, render, pooling, version, load.")
    registry.add("sglang", f"{here}.sglang:SglangRoutes", summary="Further routes of SGLang: model information and output parsers.")
    registry.add("cohere", f"{here}.cohere:CohereRoutes", summary="Cohere's /v2/embed.")
    registry.add("tei", f"{here}.tei:TeiRoutes", summary="/embed and /rerank of text-embeddings-inference.")
    registry.add("ollama", f"{here}.ollama:OllamaRoutes", summary="The Ollama API.")
    registry.add("sagemaker", f"{here}.sagemaker:SageMakerRoutes", summary="The routes of a SageMaker container.")
