"""The HTTP extension `sglang`: further routes of SGLang: model information and output parsers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.dialects import sglang

if TYPE_CHECKING:
    from fastapi import APIRouter


class SglangRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        return (sglang.router,)
