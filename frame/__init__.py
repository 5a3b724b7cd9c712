"""frame: an inference server for large language models whose backends, methods, policies, parsers
and models are plugins.

Public names are imported on first use, so `import frame` is fast and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frame.config.schema import FrameConfig
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.entrypoints.offline.engine import Engine
    from frame.entrypoints.offline.remote_client import Client
    from frame.registration import hookimpl

_MODULES = MappingProxyType(
    {
        "Client": "frame.entrypoints.offline.remote_client",
        "Engine": "frame.entrypoints.offline.engine",
        "FrameConfig": "frame.config.schema",
        "SamplingParams": "frame.core.interfaces.sampling_params",
        "hookimpl": "frame.registration",
    }
)

__all__ = ["Client", "Engine", "FrameConfig", "SamplingParams", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'frame' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
