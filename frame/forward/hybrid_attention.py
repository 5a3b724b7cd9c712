"""`HybridAttention`: one attention backend for prefill and one for decode, over one KV cache; and
`GroupAttention`: one backend object for each cache group with a page table.

A backend that compiles kernels for minutes is prepared in a background thread; meanwhile the other
backend computes all rows. Used by `components` and the model runner. Uses both backends through
`AttentionBackend` only.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from frame.core.interfaces.attention import AttentionBackend
from frame.core.interfaces.batch import AttentionOutput, HostView, SparseKeys, TreeMask
from frame.core.interfaces.media import MediaSpans

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionSpec, LatentProjections
    from frame.core.interfaces.batch import ForwardBatch

_log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 20.0  # between two log messages while kernels are compiled
_BACKGROUND_NICENESS = 10  # of the compiler, so that it does not slow down serving


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Rows of a step, as a batch with the plan of the backend that computes them."""

    backend: AttentionBackend
    batch: ForwardBatch

    def bind(self, batch: ForwardBatch) -> ForwardBatch:
        """The planned batch of all rows of `batch`, whose host view a capture changes after the
        plan (`bound_lengths`)."""
        return self.batch if batch.host is self.batch.host else replace(self.batch, host=batch.host)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The decodes and the extends of a step; None where a step has none. `whole`: all rows, if one
    backend computes them."""

    decodes: PlannedBatch | None = None
    extends: PlannedBatch | None = None
    whole: PlannedBatch | None = None


class BackgroundPreparation:
    """Runs `AttentionBackend.prepare` in a thread of low priority and logs its progress.

    Compilation waits for `allow_compilation`, because the kernels that the server needs first are
    compiled during the start.
    """

    def __init__(self, name: str, prepare: Callable[[Callable[[str], None]], None]) -> None:
        """name: the backend's class name, for the log."""
        self.error: Exception | None = None
        self._name = name
        self._prepare = prepare
        self._done = threading.Event()
        self._known = threading.Event()  # set when the preparation has ended or has to compile
        self._allowed = threading.Event()
        threading.Thread(target=self._run, name="attention-kernels", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def allow_compilation(self) -> None:
        """Allow compilation; called when no other kernels are being compiled."""
        self._allowed.set()

    def wait(self) -> None:
        """Wait until the preparation has ended, with or without an error."""
        self._allowed.set()
        self._done.wait()

    def wait_for_estimate(self) -> None:
        """Wait until the preparation has ended or reports that it has to compile kernels."""
        self._known.wait()

    def _run(self) -> None:
        if sys.platform.startswith("linux"):  # on Linux, niceness applies to a thread and its child processes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
        try:
            self._prepare(self._announce)
        except Exception as error:  # noqa: BLE001 - the other backend keeps serving; `switch` reports the error
            self.error = error
        finally:
            self._done.set()
            self._known.set()

    def _announce(self, kernels: str) -> None:
        """Called by the backend when kernels have to be compiled."""
        self._known.set()
        self._allowed.wait()
        threading.Thread(target=self._log_progress, args=(kernels,), name="attention-kernels-progress", daemon=True).start()

    def _log_progress(self, kernels: str) -> None:
        _log.info("%s: compiling %s in the background; the other attention backend serves meanwhile", self._name, kernels)
        began = time.monotonic()
        while not self._done.wait(_PROGRESS_SECONDS):
            _log.info("%s: still compiling after %.0f s", self._name, time.monotonic() - began)
        _log.info("%s: compilation ended after %.0f s", self._name, time.monotonic() - began)


class HybridAttention(AttentionBackend):
    """Both backends have the same KV layout, and both or neither store K and V; `resolve` ensures
    this. `plan` returns a `SplitPlan`."""

    def __init__(self, extends: AttentionBackend, decodes: AttentionBackend) -> None:
        super().__init__(decodes.context)
        prompts = extends.capabilities
        self.capabilities = replace(  # type: ignore[misc]  # a class attribute of other backends
            decodes.capabilities,
            expanded_bytes=prompts.expanded_bytes,
            dequantized_bytes=prompts.dequantized_bytes,
            latent_heads=prompts.latent_heads and decodes.capabilities.latent_heads,
        )
        self._extends = extends
        self._decodes = decodes
        self.backends = (extends, decodes)
        self._stand_in: AttentionBackend | None = None  # computes all rows while the other backend prepares
        self._preparation: BackgroundPreparation | None = None

    # kernels that are compiled at the start -------------------------------------------------------

    def prepare(self, layers: Sequence[AttentionSpec | LatentProjections], on_compile: Callable[[str], None] | None = None) -> None:
        """Prepare both backends. A slow one is prepared in the background if the other can compute
        all rows meanwhile."""
        pairs = (self._extends, self._decodes), (self._decodes, self._extends)
        slow = next((each for each, other in pairs if each.capabilities.compiles_at_start and _can_stand_in(other, each)), None)
        for backend in (self._extends, self._decodes):
            if backend is not slow:
                backend.prepare(layers, on_compile)
        if slow is not None:
            self._stand_in = self._decodes if slow is self._extends else self._extends
            self._preparation = BackgroundPreparation(type(slow).__name__, partial(slow.prepare, layers))

    @property
    def preparation(self) -> BackgroundPreparation | None:
        """The preparation in the background; None after `switch`, or if there is none."""
        return self._preparation

    def switch(self, is_ready: bool) -> bool:
        """End the preparation. `is_ready` (true on all ranks): use both backends from the next step
        on; otherwise the stand-in computes all rows for good.

        -> whether captured decode graphs use a backend that no longer computes decodes.
        """
        preparation, self._preparation = self._preparation, None
        if preparation is not None and preparation.error is not None:
            _log.error("%s", preparation.error)
        if not is_ready:
            _log.warning("an attention backend could not be prepared; %s computes all rows", type(self._stand_in).__name__)
            return False
        was_decoding = self._stand_in is self._extends
        self._stand_in = None
        return was_decoding

    # steps ----------------------------------------------------------------------------------------

    def plan(self, batch: ForwardBatch) -> SplitPlan:
        if self._stand_in is not None:
            return SplitPlan(whole=_planned(self._stand_in, batch))
        first, rows = batch.num_decodes, batch.num_rows
        decodes = extends = None
        if first:
            decodes = _planned(self._decodes, batch if first == rows else _decodes(batch))
        if first < rows:
            extends = _planned(self._extends, batch if not first else _extends(batch))
        return SplitPlan(decodes, extends)

    def capture_plan(self, batch: ForwardBatch) -> SplitPlan:
        backend = self._stand_in or self._decodes
        return SplitPlan(whole=PlannedBatch(backend, replace(batch, plan=backend.capture_plan(batch))))

    def replay_plan(self, plan: SplitPlan, batch: ForwardBatch) -> None:
        if plan.whole is not None:  # the backend that was captured, even after a switch
            plan.whole.backend.replay_plan(plan.whole.batch.plan, batch)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return _run_parts(lambda backend: backend.run, spec, (q, k, v), batch)

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        return _run_parts(lambda backend: backend.run_mla, layer, (q_nope, q_rope, latent), batch)


def _can_stand_in(other: AttentionBackend, backend: AttentionBackend) -> bool:
    """Whether `other` can compute the rows of `backend` too. Both fit the model."""
    can = other.capabilities
    has_graphs = can.graphs != "none" or backend.capabilities.graphs == "none"
    return not can.compiles_at_start and {"extend", "decode"} <= set(can.phases) and has_graphs


def _planned(backend: AttentionBackend, batch: ForwardBatch) -> PlannedBatch:
    return PlannedBatch(backend, replace(batch, plan=backend.plan(batch)))


def _run_parts(
    select: Callable[[AttentionBackend], Callable[..., torch.Tensor]],
    layer: AttentionSpec | LatentProjections,
    tensors: tuple[torch.Tensor, ...],
    batch: ForwardBatch,
) -> torch.Tensor:
    """Call a method of each backend with its rows of the tensors. No copy is made if both results
    were written to the batch's `AttentionOutput`."""
    plan: SplitPlan = batch.plan
    if plan.decodes is None or plan.extends is None:
        split = plan.whole or plan.decodes or plan.extends
        assert split is not None  # a step has rows
        return select(split.backend)(layer, *tensors, split.bind(batch))
    first = batch.num_decodes
    decoded = select(plan.decodes.backend)(layer, *[each[:first] for each in tensors], plan.decodes.batch)
    extended = select(plan.extends.backend)(layer, *[each[first:] for each in tensors], plan.extends.batch)
    place = batch.get(AttentionOutput)
    if place is not None:
        halves = place.tensor, place.tensor[len(decoded) :]
        if (decoded.data_ptr(), extended.data_ptr()) == (halves[0].data_ptr(), halves[1].data_ptr()):
            return place.tensor
    return torch.cat((decoded, extended))


def _decodes(batch: ForwardBatch) -> ForwardBatch:
    first = batch.num_decodes
    return _slice_batch(batch, slice(None, first), slice(None, first), batch.query_starts[: first + 1], first)


def _extends(batch: ForwardBatch) -> ForwardBatch:
    first = batch.num_decodes  # decode rows have one token each
    return _slice_batch(batch, slice(first, None), slice(first, None), batch.query_starts[first:] - first, 0)


def _slice_batch(batch: ForwardBatch, rows: slice, tokens: slice, query_starts: torch.Tensor, num_decodes: int) -> ForwardBatch:
    host = batch.host
    extensions = dict(batch.extensions)
    if (place := batch.get(AttentionOutput)) is not None:
        extensions[AttentionOutput] = place.slice_tokens(tokens)
    if (chosen := batch.get(SparseKeys)) is not None:
        extensions[SparseKeys] = SparseKeys(chosen.slots[tokens])
    if (trees := batch.get(TreeMask)) is not None:
        is_inside = (trees.rows >= rows.start) & (trees.rows < rows.stop)
        extensions[TreeMask] = TreeMask(trees.rows[is_inside] - rows.start, trees.bits[tokens])
    if (spans := batch.get(MediaSpans)) is not None:
        extensions[MediaSpans] = MediaSpans(spans.ends[tokens])
    return replace(
        batch,
        num_decodes=num_decodes,
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        kv_slots=batch.kv_slots[tokens],
        request_slots=batch.request_slots[rows],
        seq_lens=batch.seq_lens[rows],
        query_lens=batch.query_lens[rows],
        query_starts=query_starts,
        host=HostView(
            host.slots[rows],
            host.query_lens[rows],
            host.seq_lens[rows],
            host.page_table,
            None if host.min_lens is None else host.min_lens[rows],
        ),
        extensions=extensions,
    )


class GroupAttention(AttentionBackend):
    """Calls the backend of the batch's group (`ForwardBatch.group`), which is built at its first
    plan. A step of a model with windows has a page table for each group, and backends keep buffers
    of fixed addresses for one."""

    def __init__(self, make: Callable[[], AttentionBackend]) -> None:
        first = make()
        super().__init__(first.context)
        self.capabilities = first.capabilities  # type: ignore[misc]  # a class attribute of other backends
        self._make = make
        self._backends = {0: first}
        self._layers: Sequence[AttentionSpec | LatentProjections] = ()

    def prepare(self, layers: Sequence[AttentionSpec | LatentProjections], on_compile: Callable[[str], None] | None = None) -> None:
        self._layers = layers
        self._backends[0].prepare(layers, on_compile)

    def plan(self, batch: ForwardBatch) -> PlannedBatch:
        backend = self._get_backend(batch.group)
        return PlannedBatch(backend, replace(batch, plan=backend.plan(batch)))

    def capture_plan(self, batch: ForwardBatch) -> PlannedBatch:
        backend = self._get_backend(batch.group)
        return PlannedBatch(backend, replace(batch, plan=backend.capture_plan(batch)))

    def replay_plan(self, plan: PlannedBatch, batch: ForwardBatch) -> None:
        plan.backend.replay_plan(plan.batch.plan, batch)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        plan: PlannedBatch = batch.plan
        return plan.backend.run(spec, q, k, v, plan.bind(batch))

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        plan: PlannedBatch = batch.plan
        return plan.backend.run_mla(layer, q_nope, q_rope, latent, plan.bind(batch))

    def _get_backend(self, group: int) -> AttentionBackend:
        backend = self._backends.get(group)
        if backend is None:
            backend = self._backends[group] = self._make()
            backend.prepare(self._layers)
        return backend
