"""The HTTP extension `sglang`: further routes of SGLang: model information and output parsers."""

from __future__ import annotations

from frame.entrypoints.http.dialects import sglang
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class SglangRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (sglang.router,)
