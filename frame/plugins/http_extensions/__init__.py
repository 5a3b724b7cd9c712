"""Manifest of the in-tree HTTP extensions, the APIs: records only. Must not import the plugins.

A target is the module of `frame.entrypoints.http` that holds the API's routes. An API whose module
is deleted is not registered.
"""

from __future__ import annotations

from frame.host.installation import has_module
from frame.registration import KindRegistry, hookimpl

_HTTP = "frame.entrypoints.http"
# name -> (target, summary)
_APIS = {
    "openai": (f"{_HTTP}.openai.completions:OpenAIRoutes", "The OpenAI API: chat, responses, embeddings, audio, batches."),
    "realtime": (f"{_HTTP}.realtime.routes:RealtimeRoutes", "/v1/realtime of the OpenAI API, over WebSocket."),
    "anthropic": (f"{_HTTP}.dialects.anthropic:AnthropicRoutes", "The Anthropic Messages API."),
    "native": (f"{_HTTP}.native.generate:NativeRoutes", "/generate, /tokenize, reranking, scoring and classification."),
    "vllm": (f"{_HTTP}.dialects.vllm:VllmRoutes", "Further routes of vLLM: batched chat, render, pooling, version, load."),
    "sglang": (f"{_HTTP}.dialects.sglang:SglangRoutes", "Further routes of SGLang: model information and output parsers."),
    "cohere": (f"{_HTTP}.dialects.cohere:CohereRoutes", "Cohere's /v2/chat, /v1/chat, /v2/embed, /v1/embed and /v2/rerank."),
    "tei": (f"{_HTTP}.dialects.tei:TeiRoutes", "/embed, /rerank, /predict, /similarity and /info of text-embeddings-inference."),
    "ollama": (f"{_HTTP}.dialects.ollama:OllamaRoutes", "The Ollama API."),
    "sagemaker": (f"{_HTTP}.dialects.sagemaker:SageMakerRoutes", "The routes of a SageMaker container."),
}


@hookimpl
def register_http_extensions(registry: KindRegistry) -> None:
    """Add the in-tree APIs."""
    for name, (target, summary) in _APIS.items():
        if has_module(target.partition(":")[0]):
            registry.add(name, target, summary=summary)
