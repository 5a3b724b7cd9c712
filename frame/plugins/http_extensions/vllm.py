"""The HTTP extension `vllm`: batched chat, render, pooling, version and load, as vLLM has them."""

from __future__ import annotations

from frame.entrypoints.http.dialects import vllm
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class VllmRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (vllm.router,)
