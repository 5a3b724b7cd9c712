"""Media on several ranks: tokens equal those of transformers on every rank that has them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from frame.core.errors import ConfigurationError
from frame.core.interfaces.media import DividesEncoders
from frame.core.interfaces.platform import HOST
from frame.entrypoints.processes.join_groups import Groups, Place, join_groups
from frame.media.encoder import divide_orders, find_width
from frame.parallel.rank_watch import RankWatch
from tests.media.vision_rig import LAYOUTS, Prompt, VisionRig, divide
from tests.models.ranks import ThreadGroup, on_ranks


def make_prompts(folder: Path) -> list[Prompt]:
    images = Prompt().add_text(7, 8).add_image(folder, (1, 4, 3)).add_text(9).add_image(folder, (1, 2, 2), 1).add_text(10)
    return [Prompt().add_text(20, 21, 22), images]


def run(rig: VisionRig, prompts: list[Prompt]) -> list[list[int]]:
    """Text, then the layers of an item in two steps beside its decodes, and two chunks. -> the
    tokens of both."""
    text, images = prompts
    rows, orders = images.make_rows([4, 40]), images.make_orders([4, 40])
    steps = [
        rig.run_chunk(0, text, slice(0, 3), text.make_rows([])),
        rig.decode([0], divide(orders[:1], 0, 2)),
        rig.decode([0], divide(orders[:1], 2, 0)),
        rig.run_chunk(1, images, slice(0, 9), rows, [0], orders[1:]),
        rig.run_chunk(1, images, slice(9, len(rows)), rows, [0]),
        *(rig.decode([0, 1]) for _ in range(4)),
    ]
    return [[step[0] for step in steps if step], [step[1] for step in steps if len(step) > 1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_of_tensor_parallelism(layout: str, tmp_path: Path) -> None:
    prompts = make_prompts(tmp_path)
    single = VisionRig(layout, tmp_path)

    def act(group: ThreadGroup) -> list[list[int]]:
        return run(VisionRig(layout, tmp_path, groups=Groups(group), parallel={"tp": 2}), prompts)

    expected = run(single, prompts)
    for prompt, output in zip(prompts, expected, strict=True):
        assert output == single.expect(prompt, output)[: len(output)]
    assert on_ranks(2, act) == [expected, expected]


def test_a_model_that_cannot_divide_its_encoder(tmp_path: Path) -> None:
    """It encodes the item whole when its last layers are due."""
    prompts = make_prompts(tmp_path)
    expected = run(VisionRig("interleaved", tmp_path), prompts)
    rig = VisionRig("interleaved", tmp_path)
    type(rig.runner.model).encode_by_layer = None  # type: ignore[attr-defined] - then it has no such method
    assert not isinstance(rig.runner.model, DividesEncoders)
    assert run(rig, prompts) == expected


def test_ranks_divide_the_items_of_a_step(tmp_path: Path) -> None:
    prompt = Prompt().add_text(7)
    for seed, grid in enumerate([(1, 2, 2), (1, 4, 3), (1, 1, 5), (1, 2, 3)]):
        prompt.add_image(tmp_path, grid, seed).add_text(8 + seed)
    first = [30, 4, 60, 50]
    rows, orders = prompt.make_rows(first), prompt.make_orders(first)

    def act(group: Any) -> tuple[list[int], list[tuple[str, int]]]:
        groups = {} if group is None else {"groups": Groups(group), "parallel": {"tp": group.size}}
        rig = VisionRig("interleaved", tmp_path, **groups)
        tokens = rig.run_chunk(0, prompt, slice(0, len(rows)), rows, orders=orders)
        for _ in range(3):
            tokens += rig.decode([0])
        assert tokens == rig.expect(prompt, tokens)[: len(tokens)]
        return tokens, rig.runner.model.encoded  # type: ignore[attr-defined]

    expected, _ = act(None)
    outputs = on_ranks(2, act)
    assert [tokens for tokens, _ in outputs] == [expected, expected]
    assert [encoded for _, encoded in outputs] == [[("image", 1)], [("image", 3)]]
    shares = {count: [[order.item.patches for order in share] for share in divide_orders(orders, count)] for count in (2, 3, 5)}
    assert shares == {2: [[12], [6, 5, 4]], 3: [[12], [6], [5, 4]], 5: [[12], [6], [5], [4], []]}


def run_stages(layout: str, folder: Path, prompts: list[Prompt]) -> list[list[list[int]]]:
    VisionRig(layout, folder)  # writes the checkpoint
    end = threading.Barrier(2, timeout=60)

    def act(rank: int) -> list[list[int]]:
        def join(resolved: Any, registry: Any) -> Groups:
            return join_groups(resolved, registry, Place(rank, 2, f"file://{folder / 'ranks'}", watch=RankWatch(rank, 2)), HOST)

        rig = VisionRig(layout, folder, groups=join, parallel={"pp": 2})
        assert (rig.runner.inputs.media.table is None) == bool(rank)  # type: ignore[union-attr]
        outputs = run(rig, prompts)
        end.wait()  # what the first stage sends last is in its memory
        return outputs

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(act, range(2), timeout=120))


def test_the_first_stage_of_a_pipeline_encodes(tmp_path: Path) -> None:
    prompts = make_prompts(tmp_path)
    first, last = run_stages("blocks", tmp_path, prompts)
    assert first == [[], []]
    rig = VisionRig("blocks", tmp_path)
    for prompt, output in zip(prompts, last, strict=True):
        assert output == rig.expect(prompt, output)[: len(output)]


def test_stages_that_would_need_rows_are_refused(tmp_path: Path) -> None:
    rig = VisionRig("interleaved", tmp_path)
    stages = [SimpleNamespace(is_first=not rank, layers=range(rank, rank + 1)) for rank in range(2)]
    first, last = (replace(rig.runner.context, pipeline=cast("Any", stage)) for stage in stages)
    with pytest.raises(ConfigurationError, match="after its first 2 layers, and the first stage has 1; lower parallel.pp"):
        find_width(rig.runner.model, first)
    assert find_width(rig.runner.model, last) == 0
