"""Steps with media as CUDA graphs, and encoders by layers: the tokens of eager steps, and those of
transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.media.reference.prompts import make_prompts
from tests.media.reference.serving import Checkpoint, greedy
from tests.media.reference.serving import run as generate
from tests.media.vision_rig import LAYOUTS, Prompt, VisionRig
from tests.models.media_checkpoints import make_media_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EXECUTIONS = ("eager", "pieces", "decodes", "both")


def run(layout: str, folder: Path, execution: str) -> tuple[VisionRig, list[Prompt], list[list[int]]]:
    """Three prompts in chunks that split items, beside decodes, then decodes alone."""
    graphs = {"device": "cuda", "cuda_graph_max_bs": 0, "prompt_graph_max_tokens": 0}
    graphs |= {"prompt_graph_max_tokens": 64} if execution in ("pieces", "both") else {}
    graphs |= {"cuda_graph_max_bs": 8} if execution in ("decodes", "both") else {}
    rig = VisionRig(layout, folder, execution=graphs)
    assert (rig.runner.piecewise_graphs is not None) == (execution in ("pieces", "both"))
    assert (rig.runner.decode_graphs is not None) == (execution in ("decodes", "both"))
    prompts = [
        Prompt().add_text(7, 8, 9).add_image(folder, (1, 4, 3)).add_text(10, 11, 12, 13),
        Prompt().add_text(*range(20, 31)),
        Prompt().add_image(folder, (2, 2, 3), 1).add_text(14).add_image(folder, (1, 1, 5), 2).add_text(15, 16),
    ]
    outputs: list[list[int]] = [[], [], []]
    for slot, (prompt, first) in enumerate(zip(prompts, ([0], [], [40, 12]), strict=True)):
        rows, end = prompt.make_rows(first), len(prompt.token_ids)
        for start in range(0, end, 7):
            orders = prompt.make_orders(first) if start == 0 else []
            tokens = rig.run_chunk(slot, prompt, slice(start, min(start + 7, end)), rows, range(slot), orders)
            for each, token in zip(range(slot), tokens, strict=False):
                outputs[each].append(token)
        outputs[slot].append(tokens[-1])
    for _ in range(12):
        for slot, token in zip((2, 0, 1), rig.decode([2, 0, 1]), strict=True):
            outputs[slot].append(token)
    return rig, prompts, outputs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_give_the_tokens_of_eager_steps(layout: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rig, prompts, expected = run(layout, tmp_path, EXECUTIONS[0])
    for prompt, output in zip(prompts, expected, strict=True):
        assert output == rig.expect(prompt, output)[: len(output)]
    for execution in EXECUTIONS[1:]:
        assert run(layout, tmp_path, execution)[2] == expected, execution


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_and_decodes_turn_by_the_offsets_of_their_slots(layout: str, tmp_path: Path) -> None:
    media = run(layout, tmp_path, "both")[0].runner.inputs.media
    assert media is not None
    slots, places = torch.tensor([2, 0, 1], device="cuda"), torch.tensor([30, 30, 30], device="cuda")
    expected = media.find_positions(slots.cpu().numpy(), places.cpu().numpy())
    assert media.shift_positions(slots, places).tolist() == expected.tolist() and len(set(expected.tolist())) == 3


@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "InternVLForConditionalGeneration"])
def test_items_that_several_steps_encode(architecture: str, tmp_path: Path) -> None:
    """Beside decodes in graphs, in a thread on the runner's stream."""
    torch.backends.cuda.matmul.allow_tf32 = False
    checkpoint = Checkpoint(make_media_checkpoint(tmp_path / "model", architecture), 32)
    prompts = [prompt for prompt in make_prompts(architecture) for _ in range(2)]
    try:
        with checkpoint.open_engine(device="cuda", media_encode_budget=12) as engine:
            for _ in range(2):
                checkpoint.expected.check(engine, prompts, generate(engine, prompts, greedy(32)))
            assert engine.control("server_info")["media_divided"] > 0
            engine.control("check_integrity")
    finally:
        checkpoint.close()
