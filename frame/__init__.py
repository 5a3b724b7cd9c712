"""frame: an inference server for large language models whose backends, methods, policies, parsers and models are plugins.

Names are imported when they are first used, so that `import frame` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frame.core.config.schema import FrameConfig
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.entrypoints.offline.engine import Engine
    from frame.entrypoints.offline.remote_client import Client
    from frame.plugins.hookspecs import hookimpl

_HOMES = MappingProxyType(
    {
        "Client": "frame.entrypoints.offline.remote_client",
        "Engine": "frame.entrypoints.offline.engine",
        "FrameConfig": "frame.core.config.schema",
        "SamplingParams": "frame.core.interfaces.sampling_params",
        "hookimpl": "frame.plugins.hookspecs",
    }
)

__all__ = ["Client", "Engine", "FrameConfig", "SamplingParams", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'frame' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
