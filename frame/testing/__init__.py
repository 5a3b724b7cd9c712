"""Conformance suites and fakes that plugin authors import. Must not know a plugin by name.

    pytest --frame-conformance=attention_backend:NAME --frame-conformance-json=verdict.json

Names are loaded when they are used, so that importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any

_HOMES = MappingProxyType(
    {
        # suites
        "Check": "conformance",
        "Setting": "conformance",
        "SkipCheck": "conformance",
        "Subject": "conformance",
        "checks": "conformance",
        "find": "conformance",
        "MutantList": "mutants",
        "run_suite": "mutants",
        # attention kernels on their own
        "Case": "conformance_attention",
        "check_case": "conformance_attention",
        "PlainKVCache": "attention_cases",
        "RandomProjections": "attention_cases",
        "Rows": "attention_cases",
        "build_context": "attention_cases",
        "forward_batch": "attention_cases",
        "lay_out": "attention_cases",
        "planned": "attention_cases",
        # whole parts
        "FakeAttention": "fake_model",
        "FakeModel": "fake_model",
        "FakeRunner": "fake_runner",
        "SchedulerRig": "scheduler_rig",
        "load_reference": "checkpoints",
        "make_checkpoint": "checkpoints",
    }
)

__all__ = sorted(_HOMES)  # noqa: PLE0605 - a list, though not written out


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
