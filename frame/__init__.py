"""frame: an inference server for large language models whose backends, methods, policies, parsers and models are plugins.

Names are imported when they are first used, so that `import frame` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frame.core.config import FrameConfig
    from frame.core.sampling_params import SamplingParams
    from frame.entrypoints.offline import Engine
    from frame.entrypoints.remote import Client
    from frame.plugins.hookspecs import hookimpl

_HOMES = MappingProxyType(
    {
        "Client": "frame.entrypoints.remote",
        "Engine": "frame.entrypoints.offline",
        "FrameConfig": "frame.core.config",
        "SamplingParams": "frame.core.sampling_params",
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
