"""Property test of media in the scheduler: many requests over a tiny table, with aborts,
preemptions, failed steps, hits and drafts. Every request ends; every scheduled placeholder reads
the row of its item; nothing is held at the end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.media import MediaItem, PlaceholderRun
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.interfaces.modality import EncoderCost, MediaPlan
from frame.testing.fake_runner import continuation
from frame.testing.scheduler_rig import InOrder
from tests.core.scheduling.rig_machine import RigMachine
from tests.media.media_rig import MediaRig, make_item

VOCAB, PLACEHOLDER, EOS = 40, 39, 5
GRIDS = {"a": [(1, 2, 2)], "b": [(1, 1, 3)], "c": [(1, 2, 3)], "d": [(2, 1, 2)], "e": [(1, 1, 2), (1, 1, 2)]}  # of the runs of each item


def right_draft(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    """What the fake runner will draw, which knows no keys."""
    return continuation([token if token >= 0 else PLACEHOLDER for token in tokens], setup.params, setup.seed, VOCAB, maximum)


def copied_draft(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    """A right token, then what stands in the prompt, placeholders too."""
    return [*right_draft(setup, tokens, 1), *tokens[-6:]][:maximum]


def write_prompt(parts: Sequence[str | int]) -> tuple[list[int], list[MediaItem]]:
    """The prompt of these texts of so many tokens and items."""
    tokens, items = list[int](), list[MediaItem]()
    for part in parts:
        if isinstance(part, int):
            tokens += [(7 * i + part) % 30 for i in range(part)]
            continue
        runs = []
        for number, grid in enumerate(GRIDS[part]):
            tokens += [30] * number  # a text between two runs
            count = grid[0] * grid[1] * grid[2]
            runs.append(PlaceholderRun(len(tokens), count, grid, 1.5))
            tokens += [PLACEHOLDER] * count
        items.append(make_item(part, *runs))
    return tokens or [1], items


class MediaMachine(RigMachine):
    @initialize(
        page_size=st.sampled_from([1, 4]),
        slots=st.integers(1, 5),
        budget=st.sampled_from([6, 9, 16, 64]),
        pool=st.sampled_from([36, 48, 96]),
        overlap=st.booleans(),
        prefix_cache=st.booleans(),
        rows=st.sampled_from([6, 8, 12, 32]),
        block=st.sampled_from([1, 2]),
        encode_budget=st.sampled_from([2, 5, 8, 100]),
        cost=st.sampled_from([None, EncoderCost(3, 1.0, 0.0), EncoderCost(5, 2.0, 0.5)]),
        whole_items=st.booleans(),
        rotary_positions=st.booleans(),
        share=st.sampled_from([0.0, 0.5]),
        min_shared_tokens=st.sampled_from([2, 256]),
        drafts=st.sampled_from([None, right_draft, copied_draft]),
    )
    def start(
        self, page_size: int, slots: int, budget: int, pool: int, overlap: bool, prefix_cache: bool, rows: int, block: int,
        encode_budget: int, cost: EncoderCost | None, whole_items: bool, rotary_positions: bool, share: float,
        min_shared_tokens: int, drafts: object,
    ) -> None:  # fmt: skip
        plan = MediaPlan(
            table_rows=rows, encode_budget=encode_budget, modalities=("image",), whole_items=whole_items, rotary_positions=rotary_positions,
            costs={} if cost is None else {"image": cost},
        )  # fmt: skip
        config = SchedulerConfig(
            page_size=page_size, num_pages=1 + pool // page_size, max_running=slots, token_budget=budget, max_context=36,
            vocab_size=VOCAB, eos_ids=(EOS,), overlap=overlap, short_prompt_share=share, min_shared_tokens=min_shared_tokens,
        )  # fmt: skip
        self.rig = MediaRig(plan, config, InOrder(), prefix_cache=prefix_cache, block=block)
        if callable(drafts):
            self.rig.enable_drafts(drafts, 3)

    @rule(
        parts=st.lists(st.sampled_from(["a", "b", "c", "d", "e", 1, 3, 5]), min_size=1, max_size=5),
        max_tokens=st.integers(1, 6),
        namespace=st.sampled_from(["", "", "tenant:"]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        deadline=st.none() | st.integers(1, 30),
    )
    def add(self, parts: list[str | int], max_tokens: int, namespace: str, prompt_logprobs: int | None, deadline: int | None) -> None:
        tokens, items = write_prompt(parts)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=prompt_logprobs)
        self.rig.add(tokens, params, 0, namespace, None if deadline is None else float(deadline), media=items)

    @rule()
    def fail_next(self) -> None:
        self.rig.fails_next = True

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.fails_next = False
        super().teardown()


MediaMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestMedia = MediaMachine.TestCase
