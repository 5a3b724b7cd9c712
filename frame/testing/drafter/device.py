"""The conformance checks of device drafters: the output of frame-tiny with their drafts, drafts of
whole prompts and of chunks, drafts of rows alone and together, and the scheduler's half.

Used by `frame.testing.drafter.suite`. A drafter that reads a checkpoint of its own form is
checked without a model. Must not know a plugin by name, but for those that resolve the target.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from frame.checkpoint.model_config import EMBEDDED
from frame.config.schema import FrameConfig
from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.device_drafter import DeviceDrafter
from frame.core.interfaces.drafter import DrafterContext
from frame.core.interfaces.platform import HOST
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import load_parts
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.processes.components import Loaded, RunnerPlan, build_runner
from frame.entrypoints.processes.join_groups import Groups
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.local_loop import LocalLoop

STEPS, LENGTH = 3, 10
NUMBERS = random.Random(11)
PROMPTS = [[NUMBERS.randrange(6, 384) for _ in range(length)] for length in (37, 3, 20)]
PARAMS = [SamplingParams(temperature=0.8 * (row == 1), seed=row, max_tokens=LENGTH, ignore_eos=True) for row in range(3)]

DraftsByPrefix = dict[tuple[int, ...], list[int]]  # by the tokens that a draft follows


def device_checks(subject: Subject) -> Iterator[Check]:
    """The checks of a device drafter."""
    yield from collect(__name__, subject)


def check_drafts_of_the_device(subject: Subject) -> None:
    assert issubclass(subject.target, DeviceDrafter), "it derives no `DeviceDrafter`"
    drafter: DeviceDrafter = subject.target(DrafterContext(vocab_size=37, max_slots=6, max_context=64, num_steps=STEPS), subject.options)

    def propose(slots: list[int], maximum: int = STEPS) -> list[list[int]]:
        drafts = drafter.propose_tokens(np.array(slots, np.int64), np.full(len(slots), maximum, np.int32))
        ends = np.cumsum(drafts.counts)
        return [drafts.token_ids[end - count : end].tolist() for end, count in zip(ends, drafts.counts, strict=True)]

    for slot in (0, 2, 5):
        drafter.add_slot(SlotSetup(slot, SamplingParams(), 0, 2, np.array([3, 4], np.int32)))
    assert propose([0, 2, 5]) == [[], [], []], "it drafts before the device did"
    stored = np.array([[slot, slot + 1, slot + 2] for slot in (0, 5, 2)], np.int32)
    drafter.store_drafts(np.array([0, 5, 2]), stored)
    stored[:] = 7
    assert propose([2, 0]) == [[2, 3, 4], [0, 1, 2]] and propose([5], 1) == [[5]], "drafts differ from those of the device"
    drafter.observe_tokens(np.array([2]), np.array([[9, 9]], np.int32), np.array([1], np.int32))
    drafter.remove_slot(0)
    drafter.add_slot(SlotSetup(0, SamplingParams(), 0, 1, np.array([6], np.int32)))
    assert propose([0, 2, 5]) == [[], [], [5, 6, 7]], "a draft is used after other tokens than those that it follows"
    drafter.store_drafts(np.array([2]), np.array([[1, 2]], np.int32))
    assert propose([2]) == [[1, 2]], "a draft that is shorter than the longest one is not used"


def check_output_is_that_without_drafts(subject: Subject) -> None:
    loop = _make_loop(subject)
    drafts = _watch(loop)
    outputs = loop.generate(PROMPTS, PARAMS)
    assert outputs == _make_loop(None).generate(PROMPTS, PARAMS), "the output differs from that without drafts"
    assert bool(drafts), "it drafted nothing"
    loop.scheduler.check_integrity()
    loop.scheduler.flush_cache()
    assert loop.scheduler.get_load()["used_pages"] == 0, "pages are not freed"


def check_drafts_do_not_depend_on_chunks(subject: Subject) -> None:
    whole, chunks = _list_drafts(subject), _list_drafts(subject, chunk=8)
    _compare(whole, chunks, "of a prompt in chunks differs from that of the whole prompt")


def check_drafts_do_not_depend_on_other_rows(subject: Subject) -> None:
    together = _list_drafts(subject)
    alone: DraftsByPrefix = {}
    for row in range(len(PROMPTS)):
        alone |= _list_drafts(subject, rows=slice(row, row + 1))
    _compare(together, alone, "of a row alone differs from that beside other rows")


def check_drafts_do_not_depend_on_their_length(subject: Subject) -> None:
    shorter = _list_drafts(subject, steps=1)
    longer = {tokens: draft[:1] for tokens, draft in _list_drafts(subject).items()}
    _compare(shorter, longer, "of one token is not the first token of a longer draft")


def _compare(one: DraftsByPrefix, other: DraftsByPrefix, problem: str) -> None:
    common = one.keys() & other.keys()
    assert len(common) >= len(PROMPTS), "too few drafts follow the same tokens"
    for tokens in common:
        left = min(STEPS, next(len(prompt) for prompt in PROMPTS if tokens[: len(prompt)] == tuple(prompt)) + LENGTH - len(tokens))
        assert one[tokens][:left] == other[tokens][:left], f"the draft {problem}"  # the rest cannot be output


def _list_drafts(subject: Subject, chunk: int = 512, rows: slice = slice(0, None), steps: int = STEPS) -> DraftsByPrefix:
    loop = _make_loop(subject, chunk, steps)
    drafts = _watch(loop)
    loop.generate(PROMPTS[rows], PARAMS[rows])
    return drafts


def _watch(loop: LocalLoop) -> DraftsByPrefix:
    """The drafts from now on."""
    seen: DraftsByPrefix = {}
    scheduler: Any = loop.scheduler
    speculation, table = scheduler.speculation, scheduler._running.table  # noqa: SLF001
    store: Callable[[np.ndarray, np.ndarray], None] = speculation.store

    def stored(slots: np.ndarray, drafts: np.ndarray) -> None:
        for slot, draft in zip(slots.tolist(), drafts.tolist(), strict=True):
            table.flush_tokens(slot)
            seen[tuple(table.get_request(slot).all_tokens().tolist())] = draft
        store(slots, drafts)

    speculation.store = stored  # type: ignore[method-assign]
    return seen


def _make_loop(subject: Subject | None, chunk: int = 512, steps: int = STEPS) -> LocalLoop:
    """frame-tiny with this drafter; None: without."""
    capabilities: Any = None if subject is None else subject.record.capabilities
    loads_model = getattr(capabilities, "loads_model", False)
    if getattr(capabilities, "needs_draft_model", False) and not loads_model:
        raise SkipCheck("it reads a checkpoint of its own form")
    config: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "cache": {"max_total_tokens": 1024, "page_size": 4},
        "scheduler": {"max_running_requests": 4, "chunked_prefill_size": chunk, "overlap": False},
        "execution": {"device": "cpu", "threads": 1},
    }
    if subject is not None:  # the algorithm stands for the subject, which has no name in the registry
        algorithm, path = ("draft_model", EMBEDDED) if loads_model else ("mtp", None)
        config["speculative"] = {"algorithm": algorithm, "draft_model_path": path, "num_steps": steps, "adaptive": False}
    prepared = prepare(FrameConfig.model_validate(config))
    resolved, parts = prepared.resolved, load_parts(prepared.resolved, prepared.registry)
    if subject is not None:
        parts = replace(parts, drafter=Loaded(subject.target, subject.options))
    runner = build_runner(RunnerPlan(resolved, parts, HOST, Groups(LocalGroup())))
    scheduler = build_scheduler(resolved, prepared.registry, runner.capacity.pools)
    if subject is not None:
        scheduler.speculation.enable(subject.target(resolved.drafter_context, subject.options), steps)
    return LocalLoop(scheduler, runner)
