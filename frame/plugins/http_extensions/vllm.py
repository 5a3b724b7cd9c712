"""The HTTP extension `vllm`: batched chat, render, pooling, version and load, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.dialects import vllm

if TYPE_CHECKING:
    from fastapi import APIRouter


class VllmRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        return (vllm.router,)
