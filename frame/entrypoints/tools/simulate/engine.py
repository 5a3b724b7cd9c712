"""`VirtualEngine`: the scheduler of one replica on a virtual clock. Its steps compute nothing and
take what `StepTimes` says.

While every request decodes, the steps until something can happen are counted at once: no request
may end before the last of them, and an arrival cuts them where a real step would see it. The last
one is scheduled and committed like any other, so its result is that of single steps. Used by
`Fleet`. Must not know other replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from frame.config.resolved import Resolved
from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, Generate
from frame.core.scheduling.request import Request
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.tools.simulate.measures import Measures
from frame.entrypoints.tools.simulate.step_times import StepTimes, StepWork
from frame.entrypoints.tools.simulate.workload import FIRST_ID, Arrival
from frame.plugins.registry import Registry

MAX_STEPS = 4096  # that are counted at once
_CASCADE_ROWS = 4  # decodes with a common prefix whose keys are read together


class SimulationError(RuntimeError):
    """The scheduler did something that the simulation does not know."""


@dataclass(slots=True)
class _Steps:
    """Steps that are computed. `batch`: the only one; None: decodes of all requests, the last of
    which is scheduled when they end. `ends`: when each of them ends. `causes`: seconds of the first
    one by cause. `rows`: that are decoded, of the largest micro-batch."""

    batch: ScheduledBatch | None
    start: float
    ends: np.ndarray
    causes: tuple[float, ...]
    rows: int

    @property
    def until(self) -> float:
        return float(self.ends[-1])

    @property
    def last_start(self) -> float:
        """When the last one starts."""
        return float(self.ends[-2]) if len(self.ends) > 1 else self.start

    def cut(self, at: float, extra: int) -> bool:
        """End them `extra` steps after the one that is computed at a time. -> whether they end
        earlier than before."""
        count = int(np.searchsorted(self.ends, at)) + 1 + extra
        is_earlier, self.ends = count < len(self.ends), self.ends[:count]
        return is_earlier


class _Slots:
    """What the scheduler's arrays do not have. `seeds`, `last`: by slot; when its last token came,
    0.0: it had none. By seed: `paused`: the same of preempted requests; `recorded`: outputs of
    requests that wait or run."""

    def __init__(self, size: int) -> None:
        self.seeds, self.last = np.zeros(size, np.int64), np.zeros(size)
        self.paused: dict[int, float] = {}
        self.recorded: dict[int, np.ndarray] = {}


class VirtualEngine:
    """One replica. The owner calls `end_steps` at `until`.

    With overlap, a step is scheduled while the one before it is computed, so a request waits for
    the end of the step in which it arrives and of the next one.
    """

    def __init__(self, resolved: Resolved, registry: Registry, pages: int, times: StepTimes, measures: Measures) -> None:
        self._now = 0.0
        self._times, self._measures = times, measures
        self.scheduler = build_scheduler(resolved, registry, pages, self._finish, clock=lambda: self._now)
        self._running = self.scheduler._running  # noqa: SLF001 - its counters advance by several steps at once
        self._overlap, self._stages = int(resolved.overlap), resolved.plan.pp
        self._num_ids = resolved.model.vocab_size - FIRST_ID
        self._arrived: deque[tuple[float, Generate]] = deque()
        self._slots = _Slots(resolved.max_running_requests)
        self._shared = (0, 0)  # decodes, and their cached tokens that need not be read again; (0, 0): not counted
        self._steps: _Steps | None = None
        self._num_decoding = 0  # requests that had a token in the last step and go on
        self.num_requests = 0
        self.on_finish: Callable[[], object] = int

    @property
    def until(self) -> float | None:
        """When the steps that are computed end; None: it is idle."""
        return None if self._steps is None else self._steps.until

    def add_request(self, arrival: Arrival, number: int) -> bool:
        """A request arrives. -> whether `until` has changed. `number`: another one for each
        request."""
        params = SamplingParams(max_tokens=arrival.output, temperature=0.0, ignore_eos=True, seed=number)
        self._arrived.append((arrival.at, Generate(rid=str(number), token_ids=arrival.prompt, params=params)))
        if arrival.recorded is not None:
            self._slots.recorded[number] = arrival.recorded
        self.num_requests += 1
        if self._steps is not None:
            return self._steps.cut(arrival.at, self._overlap)
        self._start_steps(arrival.at, arrival.at)
        return self._steps is not None

    def end_steps(self) -> None:
        """The steps that are computed have ended: commit them, and start the next."""
        steps, self._steps = self._steps, None
        if steps is None:
            raise SimulationError("no step is computed")
        batch = steps.batch
        if batch is None:
            self._skip_steps(len(steps.ends) - 1)
            self._now = steps.last_start
            batch = self.scheduler.schedule_batch(self._now)
            if batch is None or batch.num_decodes != self._num_decoding:
                raise SimulationError("a step of decodes has other rows than the one before it")
            self._enter(batch)
        self._now = steps.until
        self._commit(steps, batch)
        self._start_steps(self._now, steps.last_start)

    def _start_steps(self, now: float, previous_start: float) -> None:
        """Start the next steps. `previous_start`: when the step that has ended now began."""
        self._now = now
        self._take_arrived(previous_start if self._overlap else now)
        if not self._arrived and 0 < self._num_decoding == self.scheduler.num_requests and (count := self._count_decodes()) > 1:
            self._steps = self._compute_decodes(count, now)
            return
        batch = self.scheduler.schedule_batch(now)
        if batch is None and self._arrived:
            self._take_arrived(now)
            batch = self.scheduler.schedule_batch(now)
        if batch is None:
            if self.scheduler.num_requests:
                raise SimulationError(f"{self.scheduler.num_requests} requests wait, and the scheduler runs none")
            return
        self._enter(batch)
        self._steps = self._compute(batch, now)

    def _take_arrived(self, until: float) -> None:
        while self._arrived and self._arrived[0][0] <= until:
            at, message = self._arrived.popleft()
            if (refusal := self.scheduler.add_request(message, arrival=at)) is not None:
                self._leave(message.params.seed)
                self._measures.refuse(refusal.error or refusal.reason)

    def _enter(self, batch: ScheduledBatch) -> None:
        """Note the requests that leave and enter slots with a step."""
        for slot in batch.released:
            self._slots.paused[int(self._slots.seeds[slot])] = float(self._slots.last[slot])
        for setup in batch.setups:
            self._slots.seeds[setup.slot] = setup.seed
            self._slots.last[setup.slot] = self._slots.paused.pop(setup.seed, 0.0)
        if batch.setups or batch.released:
            self._shared = (0, 0)

    # several steps --------------------------------------------------------------------------------

    def _count_decodes(self) -> int:
        """Steps until a request ends or pages may run out."""
        a, kv_manager = self._running.table.arrays, self._running.kv_manager
        slots = np.flatnonzero(a.can_decode)
        if len(slots) != self._num_decoding:  # some wait for pages
            return 0
        room = kv_manager.num_growable // len(slots) * kv_manager.page_size
        return min(int((a.max_num_tokens[slots] - a.num_tokens[slots]).min()), room, MAX_STEPS)

    def _compute_decodes(self, count: int, now: float) -> _Steps:
        a = self._running.table.arrays
        slots = np.flatnonzero(a.can_decode)
        if self._stages > 1:
            number_of = slots % self._stages
            slots = slots[number_of == np.bincount(number_of).argmax()]
        computed, rows = a.num_computed_tokens[slots].astype(np.int64), len(slots)
        cached = int(computed.sum()) + rows - self._count_shared(slots, computed)
        causes = self._times.measure(StepWork(rows, rows, cached, 0.0))
        return _Steps(None, now, now + np.cumsum(sum(causes) + self._times.cached_token * rows * np.arange(count)), causes, rows)

    def _skip_steps(self, count: int) -> None:
        """Give every running request `count` tokens, as that many steps do."""
        if not count:
            return
        table = self._running.table
        a = table.arrays
        slots = np.flatnonzero(a.can_decode)
        self._running.kv_manager.grow_rows_to(slots, a.num_computed_tokens[slots] + count + 1)
        tokens = self._draw(slots, a.num_tokens[slots], count)
        for slot, row in zip(slots.tolist(), tokens, strict=True):
            table.flush_tokens(slot)
            table.get_request(slot).output.frombytes(row.tobytes())
        for counter in (a.num_computed_tokens, a.num_tokens, a.num_committed_tokens):
            counter[slots] += count
        self.scheduler._step += count  # noqa: SLF001 - the reserve for growth shrinks with steps

    # one step -------------------------------------------------------------------------------------

    def _compute(self, batch: ScheduledBatch, now: float) -> _Steps:
        chosen = slice(None) if self._stages == 1 else self._find_micro_batch(batch)
        is_decode = np.arange(len(batch.slots))[chosen] < batch.num_decodes
        slots, computed, scheduled = batch.slots[chosen], batch.num_computed[chosen].astype(np.int64), batch.num_scheduled[chosen]
        rows = int(is_decode.sum())
        cached = int(computed.sum()) + rows - self._count_shared(slots[:rows], computed[:rows])
        chunks, starts = scheduled[rows:].astype(np.int64), computed[rows:]
        pairs = float((chunks * starts).sum() + (chunks * chunks).sum() / 2)
        causes = self._times.measure(StepWork(rows + int(chunks.sum()), int(batch.samples[chosen].sum()), cached, pairs))
        return _Steps(batch, now, np.array([now + sum(causes)]), causes, rows)

    def _find_micro_batch(self, batch: ScheduledBatch) -> np.ndarray:
        """The rows of the micro-batch with the most tokens."""
        number_of = batch.slots % self._stages
        tokens = np.where(np.arange(len(number_of)) < batch.num_decodes, 1, batch.num_scheduled)
        return np.flatnonzero(number_of == np.bincount(number_of, tokens).argmax())

    def _count_shared(self, slots: np.ndarray, computed: np.ndarray) -> int:
        """Cached tokens of decodes that cascade attention reads once for several rows."""
        if self._shared[0] != len(slots):
            saved, table = 0, self._running.table.arrays.page_table
            page_size = self._running.kv_manager.page_size
            _, group_of, sizes = np.unique(table[slots, 0], return_inverse=True, return_counts=True)
            for group in np.flatnonzero(sizes >= _CASCADE_ROWS).tolist():
                rows = np.flatnonzero(group_of == group)
                pages = table[slots[rows], : int(computed[rows].min()) // page_size]
                equal = (pages == pages[0]).all(axis=0)
                saved += (len(rows) - 1) * (len(equal) if equal.all() else int(equal.argmin())) * page_size
            self._shared = (len(slots), saved)
        return self._shared[1]

    def _commit(self, steps: _Steps, batch: ScheduledBatch) -> None:
        """Commit the last step, and count all."""
        slots = batch.slots[batch.samples]
        self._measures.add_steps(steps.causes, steps.ends, steps.start, self._times.cached_token * steps.rows)
        if len(slots):
            last = self._slots.last[slots]
            self._measures.gaps.add(steps.ends[0] - last[last > 0.0])
            self._measures.gaps.add(np.diff(steps.ends), len(slots))
            self._slots.last[slots] = steps.until
        places = batch.num_computed[batch.samples] + batch.num_scheduled[batch.samples]
        result = StepResult(step=batch.step, token_ids=self._draw(slots, places, 1)[:, 0])
        self._num_decoding = len(slots) - len(self.scheduler.commit(batch, result).finishes)

    def _draw(self, slots: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
        """The next `count` tokens of slots that have `places` tokens, int32 [n, count]: the
        recorded ones, or some that differ between requests."""
        seeds = self._slots.seeds[slots]
        ids = ((7919 * seeds + 31 * places)[:, None] + 31 * np.arange(count)) % self._num_ids + FIRST_ID
        for row, seed in enumerate(seeds.tolist()) if self._slots.recorded else ():
            if (recorded := self._slots.recorded.get(seed)) is not None:
                start = int(places[row]) - self._running.table.get_request(int(slots[row])).prompt_len
                part = recorded[start : start + count]
                ids[row, : len(part)] = part
        return ids.astype(np.int32)

    def _finish(self, request: Request, finish: Finish) -> None:
        self._measures.finish(request, finish, self._now)
        self._leave(request.seed)
        self._slots.paused.pop(request.seed, None)

    def _leave(self, seed: int | None) -> None:
        self._slots.recorded.pop(seed or 0, None)
        self.num_requests -= 1
        self.on_finish()
