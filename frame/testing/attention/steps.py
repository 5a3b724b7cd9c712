"""Checks of attention backends over several layers and steps, against dense float64 arithmetic.

The steps hold chunks of prompts, prefix hits, preemption, slots and pages that another request had
before, and two rows of one slot. The next step's plan is made before a step runs. Must not know a
scheduler: the steps are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec, Phase
from frame.core.interfaces.batch import ForwardBatch
from frame.entrypoints.tools.bench.paged_batches import DTYPES, Case, Pages, PlainKVCache, Rows, forward_batch, requirements
from frame.testing.attention.cases import LATENT, with_pages_for
from frame.testing.attention.reference import TOLERANCE, Inputs, Placed, make_inputs, no_waiting, poisoned_memory, reference
from frame.testing.conformance import Check, SkipCheck, Subject
from frame.testing.tensors import require_near, unchanged

LAYERS, SLOTS, LENGTH = 3, 6, 96
MakeBackend = Callable[[Case], AttentionBackend]


class LayeredKVCache(PlainKVCache):
    """A cache of several layers."""

    def __init__(self, page_size: int, layers: list[PlainKVCache]) -> None:
        super().__init__(page_size, [part for layer in layers for part in layer.parts])
        self.layers = layers

    def store(self, spec: AttentionSpec, slots: torch.Tensor, *tensors: torch.Tensor) -> None:
        self.layers[spec.layer].store(spec, slots, *tensors)

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.layers[layer].parts

    def scales(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.layers[layer].factors


@dataclass
class Sequence:
    """A request: its slot, its pages and the true keys and values of all its positions."""

    slot: int
    pages: list[int]
    layers: list[tuple[torch.Tensor, ...]]  # each part float64 [LENGTH, …]
    num_computed: int = 0


@dataclass(frozen=True)
class StepRow:
    """What one step computes of a request."""

    sequence: Sequence
    slot: int
    before: int  # cached tokens
    new: int

    @property
    def stop(self) -> int:
        return self.before + self.new


@dataclass
class Step:
    """Rows, decodes first, the page table of the step, and the pages freed before it."""

    rows: list[StepRow]
    num_decodes: int
    table: np.ndarray
    freed: list[int] = field(default_factory=list)


class Script:
    """Writes the steps of a small engine: `extend`, `decode`, `finish`, and `step` at the end of
    each."""

    def __init__(self, case: Case, layers: list[Inputs]) -> None:
        self.case, self.specs = case, layers
        self.generator = torch.Generator().manual_seed(case.seed)
        self.num_pages = 8 * -(-LENGTH // case.page_size)
        self.free = [int(page) for page in np.random.default_rng(case.seed).permutation(self.num_pages)]
        self.table = np.full((SLOTS, self.num_pages), 2**30, dtype=np.int32)
        self.steps: list[Step] = []
        self.rows: list[StepRow] = []
        self.decodes: list[StepRow] = []
        self.freed: list[int] = []

    def admit(self, slot: int, prefix: Sequence | None = None, pages: int = 0) -> Sequence:
        """A new request, which shares the first pages of `prefix`."""
        layers = [tuple(self.draw(LENGTH, *shape) for shape in inputs.shapes) for inputs in self.specs]
        new = Sequence(slot, [] if prefix is None else prefix.pages[:pages], layers)
        self.table[slot] = 2**30
        if prefix is not None:
            new.num_computed = pages * self.case.page_size
            for ours, theirs in zip(layers, prefix.layers, strict=True):
                for part, shared in zip(ours, theirs, strict=True):
                    part[: new.num_computed] = shared[: new.num_computed]
        return new

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.case.dtype).double()

    def extend(self, sequence: Sequence, tokens: int) -> None:
        self._add(self.rows, sequence, tokens)

    def decode(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self._add(self.decodes, sequence, 1)

    def _add(self, rows: list[StepRow], sequence: Sequence, tokens: int) -> None:
        rows.append(StepRow(sequence, sequence.slot, sequence.num_computed, tokens))
        sequence.num_computed += tokens
        while len(sequence.pages) * self.case.page_size < sequence.num_computed:
            sequence.pages.append(self.free.pop(0))
        self.table[sequence.slot, : len(sequence.pages)] = sequence.pages

    def leave(self, sequence: Sequence, slot: int | None = None, kept: int = 0) -> None:
        """The request ends, or is preempted and comes back in another slot. Its pages but the first
        `kept` are free, and the next to be given out, the last one first."""
        self.freed += sequence.pages[kept:]
        self.free[:0] = reversed(sequence.pages[kept:])
        self.table[sequence.slot] = 2**30
        if slot is not None:
            sequence.slot, sequence.pages, sequence.num_computed = slot, [], 0

    def step(self) -> None:
        self.steps.append(Step([*self.decodes, *self.rows], len(self.decodes), self.table.copy(), self.freed))
        self.rows, self.decodes, self.freed = [], [], []


def write(script: Script) -> list[Step]:
    """Fourteen steps of eight requests in six slots."""
    pages = -(-40 // script.case.page_size)  # shared ones
    shared = pages * script.case.page_size
    a, b = script.admit(3), script.admit(0)
    script.extend(a, shared + 5)
    script.extend(b, 9)
    script.step()
    script.decode(a)
    script.extend(b, 21)  # a second chunk
    script.step()
    c = script.admit(5, a, pages)  # a prefix hit
    script.decode(a, b)
    script.extend(c, 7)
    script.step()
    script.decode(a, b, c)
    script.step()
    script.leave(a, slot=1, kept=pages)  # preempted; c keeps the shared pages
    d = script.admit(3)  # in the slot of a, on its last page
    script.decode(b, c)
    script.extend(d, 13)
    script.step()
    script.extend(a, shared + 7)  # computed again in another slot
    script.decode(d, b)
    script.step()
    script.leave(d)
    script.decode(a, c)
    script.step()
    e = script.admit(3)  # as long as d was, on other pages
    script.decode(c, b)
    script.extend(e, 13)
    script.step()
    script.decode(e, a, e, b, e)  # three tokens of one prompt as decodes of one slot
    script.step()
    script.leave(b)
    f = script.admit(0)
    script.extend(f, 1)
    script.step()
    script.decode(f, c)
    script.step()
    script.decode(e, f)
    script.step()
    for slot in (2, 4):  # two steps with equal lengths, on different pages
        script.extend(script.admit(slot), 6)
        script.step()
    return script.steps


def layers_of(case: Case, subject: Subject) -> list[Inputs]:
    """The facts of each layer: scales differ, and where the backend has them, one layer has a
    window and one a soft cap."""
    capabilities = subject.record.capabilities
    layers = []
    for layer in range(LAYERS):
        changed = replace(case, rows=Rows.of([1]), seed=case.seed + layer)
        if layer == 1 and getattr(capabilities, "sliding_window", False):
            changed = replace(changed, window=19)
        if layer == 2 and getattr(capabilities, "soft_cap", False):
            changed = replace(changed, soft_cap=2.5)
        inputs = make_inputs(changed)
        inputs.spec = replace(inputs.spec, layer=layer, scale=inputs.spec.scale * (1 + 0.4 * layer))
        layers.append(inputs)
    return layers


class Player:
    """Runs a script on a backend."""

    def __init__(self, backend: AttentionBackend, case: Case, script: Script) -> None:
        self.backend, self.case, self.script = backend, case, script
        shape = (script.num_pages, case.page_size)
        layers = [
            PlainKVCache(
                case.page_size, [torch.full((*shape, *part), torch.nan, dtype=case.dtype, device=case.device) for part in inputs.shapes]
            )
            for inputs in script.specs
        ]
        self.kv = LayeredKVCache(case.page_size, layers)
        self.runs = 0

    def play(self) -> None:
        """All steps; on a CPU each plan is made before the step ahead of it runs, on a GPU while it
        runs."""
        steps = self.script.steps
        batches = [self.batch(step) for step in steps]
        ahead = not self.case.device.startswith("cuda")
        plans = {0: self.plan(batches[0])}
        for number, (step, batch) in enumerate(zip(steps, batches, strict=True)):
            if ahead and number + 1 < len(steps):
                plans[number + 1] = self.plan(batches[number + 1])
            elif number not in plans:
                plans[number] = self.plan(batch)
            self.run(number, step, replace(batch, plan=plans.pop(number)))
        if not self.runs:
            raise SkipCheck("the backend computes none of these steps: its phases are " + ", ".join(self.backend.capabilities.phases))

    def batch(self, step: Step) -> ForwardBatch:
        size, places = self.case.page_size, []
        for row in step.rows:
            positions = np.arange(row.stop)
            places.append(step.table[row.slot, positions // size].astype(np.int64) * size + positions % size)
        slots = np.array([row.slot for row in step.rows], dtype=np.int32)
        return forward_batch(self.rows(step), Pages(size, self.script.num_pages, step.table, slots, places), self.kv, self.case.device)

    def rows(self, step: Step) -> Rows:
        return Rows(tuple(row.before for row in step.rows), tuple(row.new for row in step.rows), step.num_decodes)

    def plan(self, batch: ForwardBatch) -> object:
        if self.backend.capabilities.device_lengths:  # bounds within the pages of each row
            host, size = batch.host, self.case.page_size
            minimum = np.maximum(host.query_lens, host.seq_lens - 3).astype(np.int32)
            host = replace(host, seq_lens=(-(-host.seq_lens // size) * size).astype(np.int32), min_lens=minimum)
            batch = replace(batch, host=host)
        host = batch.host
        read_only = {"host.slots": host.slots, "host.query_lens": host.query_lens, "host.seq_lens": host.seq_lens}
        with unchanged({**read_only, "host.page_table": host.page_table}, "plan"), no_waiting(self.case.device):
            return self.backend.plan(batch)

    def run(self, number: int, step: Step, batch: ForwardBatch) -> None:
        for part in (part for layer in self.kv.layers for part in layer.parts):
            part[step.freed] = torch.nan
        phase: Phase = "mixed" if 0 < step.num_decodes < len(step.rows) else "decode" if step.num_decodes else "extend"
        for layer, inputs in enumerate(self.script.specs):
            queries = [self.script.draw(row.new, self.case.heads, self.case.head_dim) for row in step.rows]
            cached = [tuple(part[: row.stop] for part in row.sequence.layers[layer]) for row in step.rows]
            inputs_of_step = replace(inputs, queries=queries, cached=cached)
            placed = self.place(inputs_of_step, step, batch)
            if not self.backend.capabilities.stores_kv or phase not in self.backend.capabilities.phases:
                batch.store_kv(inputs.spec, *placed.step_kv)
            if phase in self.backend.capabilities.phases:
                self.check(number, layer, placed, inputs_of_step, self.rows(step))

    def place(self, inputs: Inputs, step: Step, batch: ForwardBatch) -> Placed:
        case = self.case
        new = [tuple(part[row.before :] for part in parts) for parts, row in zip(inputs.cached, step.rows, strict=True)]
        tensors = [torch.cat(inputs.queries), *(torch.cat(parts) for parts in zip(*new, strict=True))]
        q, *step_kv = (tensor.to(device=case.device, dtype=case.dtype) for tensor in tensors)
        return Placed.of(case, inputs, q, step_kv, batch).spread()

    def check(self, number: int, layer: int, placed: Placed, inputs: Inputs, rows: Rows) -> None:
        case = replace(self.case, rows=rows, window=inputs.spec.sliding_window, soft_cap=inputs.spec.soft_cap)
        expected_cache = [part.clone() for part in self.kv.layers[layer].parts]
        if self.backend.capabilities.stores_kv:
            PlainKVCache(case.page_size, expected_cache).store(inputs.spec, placed.batch.kv_slots, *placed.step_kv)
        others = {f"the cache of layer {other}": part for other in range(LAYERS) if other != layer for part in self.kv.layers[other].parts}
        with unchanged({**placed.read_only(), **others}, "run"), poisoned_memory(), no_waiting(case.device):
            out = placed.run(self.backend, inputs.spec, placed.batch)
        where = f"step {number}, layer {layer}"
        for now, then in zip(self.kv.layers[layer].parts, expected_cache, strict=True):
            held = torch.equal(now.nan_to_num(nan=1e4), then.nan_to_num(nan=1e4))
            assert held, f"{where}: after `run`, the cache differs from what this step and the steps before it stored"
        require_near(out.double().cpu(), reference(case, inputs), f"{where} ({inputs.spec})", TOLERANCE[case.dtype], is_relative=False)
        self.runs += 1


def check_steps(make: MakeBackend, subject: Subject, case: Case) -> None:
    """Raises AssertionError unless every layer of every step agrees with the reference."""
    script = Script(case, layers_of(case, subject))
    write(script)
    Player(make(case), case, script).play()


def step_checks(make: MakeBackend, subject: Subject) -> Iterator[Check]:
    """The checks for the sizes that the capabilities cover."""
    capabilities, device = subject.record.capabilities, subject.setting.device
    heads = Case(Rows.of([1]), head_dim=64, v_head_dim=64)
    candidates = [
        {"steps-mha": heads, "steps-mha-wide": replace(heads, page_size=64, head_dim=128, v_head_dim=128)},
        {"steps-mha-pages-of-1": replace(heads, page_size=1)},
        {
            "steps-mla": Case(Rows.of([1]), **LATENT),
            "steps-mla-512-64": Case(Rows.of([1]), page_size=64, heads=16, rank=512, rope=64, head_dim=192, v_head_dim=128),
        },
    ]
    for alternatives in candidates:  # the first that fits
        for name, case in alternatives.items():
            dtype = next(iter(getattr(capabilities, "dtypes", DTYPES)))
            placed = replace(case if name.endswith("-1") else with_pages_for(case, capabilities), dtype=DTYPES[dtype], device=device)
            if not capabilities.unsupported(replace(requirements(placed), phases=())):
                yield Check(f"{name}-{dtype}", partial(check_steps, make, subject, placed))
                break
