"""`Forward`: the model's forward pass, plain, or compiled for small decode batches, with a way back
when compiling fails.

Knows no model; `torch.compile` sees whatever the model and its backend do.
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


def keep_out(part: object, *names: str) -> None:
    """Let these methods of `part` run as they are inside of compiled code: what depends on each
    step's plan compiles anew for each plan."""
    for name in names:
        setattr(part, name, torch.compiler.disable(getattr(part, name)))


class Forward:
    """Called with a batch. Decode batches of up to `max_rows` rows are compiled when `max_rows` is
    not 0; shapes are dynamic, so that a handful of compilations serve all of them, in the first
    steps."""

    def __init__(self, plain: Pass, max_rows: int = 0) -> None:
        self._plain = plain
        self._max_rows = max_rows
        self._compiled: Pass | None = torch.compile(plain, dynamic=True) if max_rows else None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        if self._compiled is None or batch.num_decodes != batch.num_rows or batch.num_rows > self._max_rows:
            return self._plain(batch)
        try:
            return self._compiled(batch)
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways; an error of the model's own comes again below
            reason = f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0]
            _log.warning("torch.compile does not work with this model and runs it uncompiled from here on: %s", reason)
            self._compiled = None
        return self._plain(batch)  # writes the same K and V again, which changes nothing
