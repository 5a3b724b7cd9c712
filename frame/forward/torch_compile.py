"""`Forward`: the model's forward pass, optionally compiled with `torch.compile` for small decode
batches; it runs uncompiled after a compilation error.

Used by the builder of model runners. Must not know a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch

    Pass = Callable[[ForwardBatch], torch.Tensor]

_log = logging.getLogger(__name__)


def keep_out(plugin: object, *names: str) -> None:
    """Exclude these methods of `plugin` from compilation: they depend on each step's plan and would
    be compiled anew for each."""
    for name in names:
        setattr(plugin, name, torch.compiler.disable(getattr(plugin, name)))


class Forward:
    """Decode batches of up to `max_rows` rows are compiled; 0: none. Shapes are dynamic, so that
    the few compilations of the first steps cover all batch sizes."""

    def __init__(self, plain: Pass, max_rows: int = 0) -> None:
        self._plain = plain
        self._max_rows = max_rows
        self._compiled: Pass | None = torch.compile(plain, dynamic=True) if max_rows else None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        if self._compiled is None or batch.num_decodes != batch.num_rows or batch.num_rows > self._max_rows:
            return self._plain(batch)
        try:
            return self._compiled(batch)
        except Exception as error:  # noqa: BLE001 - compilers raise many types; an error of the model is raised again below
            reason = f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0]
            _log.warning("torch.compile failed for this model, which runs uncompiled from now on: %s", reason)
            self._compiled = None
        return self._plain(batch)  # may write the same K and V a second time, which is harmless
