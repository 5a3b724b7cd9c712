"""Steps with media, from feature files to tokens: the tokens that transformers gives with
embeddings and positions of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from frame.adapters.device_adapters import _SlotTables
from frame.core.interfaces.batch import ForwardBatch, SlotSetup
from frame.core.interfaces.media import EncodeOrder, MediaRows, RotaryPositions
from frame.core.interfaces.sampling_params import SamplingParams
from frame.media.encoder import count_bytes
from frame.speculation.draft_runner import DraftRunner
from tests.media.vision_rig import LAYOUTS, NUM_LAYERS, Prompt, VisionRig, divide
from tests.speculation.test_draft_graphs import CapturableAttention

OUTPUT = 6
EXECUTIONS = ("eager", "pieces", "graphs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def make_rig(layout: str, folder: Path, execution: str = "eager") -> VisionRig:
    rig = VisionRig(layout, folder, attention=CapturableAttention if execution == "graphs" else None)
    if execution != "eager":
        rig.runner.capture_piecewise_graphs(64)
    if execution == "graphs":
        rig.runner.capture_decode_graphs(8)
    return rig


def make_prompts(folder: Path) -> list[Prompt]:
    return [
        Prompt().add_text(7, 8, 9).add_image(folder, (1, 4, 3)).add_text(10, 11, 12, 13),
        Prompt().add_text(*range(20, 31)),
        Prompt().add_image(folder, (2, 2, 3), 1).add_text(14).add_image(folder, (1, 1, 5), 2).add_text(15, 16),
    ]


def check(rig: VisionRig, prompt: Prompt, output: list[int]) -> None:
    assert output == rig.expect(prompt, output)[: len(output)]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_that_split_items_beside_decodes(layout: str, execution: str, folder: Path) -> None:
    rig, prompts = make_rig(layout, folder, execution), make_prompts(folder)
    outputs: list[list[int]] = [[], [], []]
    started: list[int] = []
    first = [[0], [], [40, 12]]
    for slot, prompt in enumerate(prompts):
        rows, end = prompt.make_rows(first[slot]), len(prompt.token_ids)
        for start in range(0, end, 7):
            orders = prompt.make_orders(first[slot]) if start == 0 else []
            span = slice(start, min(start + 7, end))
            tokens = rig.run_chunk(slot, prompt, span, rows, started, orders)
            for each, token in zip(started, tokens, strict=False):
                outputs[each].append(token)
        outputs[slot].append(tokens[-1])
        started.append(slot)
    for _ in range(OUTPUT):
        for slot, token in zip((2, 0, 1), rig.decode([2, 0, 1]), strict=True):
            outputs[slot].append(token)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(rig, prompt, output)
    assert rig.runner.model.encoded == [("image", 1), ("image", 2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resident_item_is_read_without_an_order(layout: str, folder: Path) -> None:
    rig = make_rig(layout, folder)
    prompt = Prompt().add_text(7).add_image(folder, (1, 3, 3)).add_text(8, 9)
    rows, span = prompt.make_rows([30]), slice(0, len(prompt.token_ids))
    outputs = [rig.run_chunk(0, prompt, span, rows, orders=prompt.make_orders([30])), rig.run_chunk(3, prompt, span, rows)]
    assert outputs[0] == outputs[1]
    check(rig, prompt, outputs[0])


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_text_has_the_bits_of_a_model_without_encoders(execution: str, folder: Path) -> None:
    rigs = [make_rig("interleaved", folder, execution), VisionRig("interleaved", folder, has_media=False)]
    if execution == "pieces":  # a request with an item leaves its rows and positions at the addresses of graphs
        prompt = Prompt().add_image(folder, (1, 4, 4)).add_text(6)
        rigs[0].run_chunk(5, prompt, slice(0, 17), prompt.make_rows([0]), orders=prompt.make_orders([0]))
    seen: list[list[torch.Tensor]] = []
    for rig in rigs:
        kept: list[torch.Tensor] = []
        head = rig.runner.model.compute_logits

        def watched(hidden: torch.Tensor, kept: list[torch.Tensor] = kept, head=head) -> torch.Tensor:  # type: ignore[no-untyped-def]
            logits = head(hidden)
            kept.append(logits.clone())
            return logits

        rig.runner.model.compute_logits = watched  # type: ignore[method-assign]
        text = Prompt().add_text(*range(30, 45))
        rig.run_chunk(2, text, slice(0, 15), text.make_rows([]))
        for _ in range(3):
            rig.decode([2])
        seen.append(kept)
    assert rigs[1].runner.inputs.media is None
    for ours, theirs in zip(*seen, strict=True):
        if execution == "eager":
            assert torch.equal(ours[:1], theirs[:1])
        else:  # graphs compute with rows of padding
            torch.testing.assert_close(ours[:1], theirs[:1], atol=2e-5, rtol=2e-5)


def test_steps_with_items_run_in_no_decode_graph(folder: Path) -> None:
    rig = make_rig("interleaved", folder, "graphs")
    replayed: list[int] = []
    replay = rig.runner._replay
    rig.runner._replay = lambda inputs: replayed.append(len(inputs.rows.slots)) or replay(inputs)  # type: ignore[func-returns-value,method-assign]
    prompt = Prompt().add_image(folder, (1, 1, 2)).add_text(6)
    rig.run_chunk(0, prompt, slice(0, 3), prompt.make_rows([0]), orders=prompt.make_orders([0]))
    assert not replayed
    text = Prompt().add_text(6, 7, 8)
    rig.run_chunk(1, text, slice(0, 3), text.make_rows([]), decodes=[0])
    assert replayed == [4]


def test_what_a_step_reads_of_media(folder: Path) -> None:
    """Decodes come first: they are no placeholders, and have the offsets of their slots."""
    rig = make_rig("interleaved", folder)
    inputs, batches = rig.runner.inputs, []
    build = inputs.build_forward_batch
    inputs.build_forward_batch = lambda *args, **more: batches.append(build(*args, **more)) or batches[-1]  # type: ignore[func-returns-value,method-assign]
    prompt = Prompt().add_text(7, 8).add_image(folder, (1, 4, 4)).add_text(9)
    assert prompt.offset == -12
    rows = prompt.make_rows([8])
    rig.run_chunk(4, prompt, slice(0, 19), rows, orders=prompt.make_orders([8]))
    rig.run_chunk(6, prompt, slice(0, 19), rows, decodes=[4])
    batch = batches[-1][0]
    media, turned = batch.get(MediaRows), batch.get(RotaryPositions)
    assert media.rows.tolist() == [-1, *rows.tolist()] and media.rows.dtype == torch.int64
    assert turned.positions.t().tolist() == [[7, 7, 7], *map(list, prompt.positions)]
    assert batch.positions.tolist() == [7, *(each[0] for each in prompt.positions)]
    assert batch.seq_lens.tolist() == [20, 19]
    rig.decode([4, 6])
    batch = batches[-1][0]
    assert batch.positions.tolist() == [8, 7] and not batch.extensions and batch.seq_lens.tolist() == [21, 20]


def test_positions_stay_within_the_table(folder: Path) -> None:
    """Those of a video with long pauses are ahead of its tokens."""
    rig = make_rig("blocks", folder)
    media = rig.runner.inputs.media
    maximum = rig.runner.context.limits.max_context
    text = Prompt().add_text(6)
    order = msgspec.structs.replace(rig.setup(3, text), position_offset=10_000)
    rig.script.run(extends=[(3, [6])], setups=[order])
    assert media is not None
    assert media.find_positions(np.array([3, 2]), np.array([1, 5])).tolist() == [maximum - 1, 5]
    assert media.shift_positions(torch.tensor([3, 2]), torch.tensor([1, 5])).tolist() == [maximum - 1, 5]
    rig.decode([3])


def test_rows_and_columns_of_late_frames_stay_within_the_table(folder: Path) -> None:
    """A frame's position is bounded, and its rows and columns are before it."""
    rig = make_rig("interleaved", folder)
    inputs, batches = rig.runner.inputs, []
    build = inputs.build_forward_batch
    inputs.build_forward_batch = lambda *args, **more: batches.append(build(*args, **more)) or batches[-1]  # type: ignore[func-returns-value,method-assign]
    prompt = Prompt().add_text(7, 8).add_image(folder, (2, 2, 3)).add_text(9)
    late = 10 * rig.runner.context.limits.max_context
    prompt.positions[8:14] = [(frame + late, row, column) for frame, row, column in prompt.positions[8:14]]
    rig.run_chunk(4, prompt, slice(0, 15), prompt.make_rows([8]), orders=prompt.make_orders([8]))
    positions = batches[-1][0].get(RotaryPositions).positions.t().tolist()
    last = rig.runner.context.limits.max_context - 1
    assert positions == [[min(each, last) for each in three] for three in prompt.positions]


def test_an_item_that_cannot_be_encoded_ends_its_step_alone(folder: Path) -> None:
    rig = make_rig("interleaved", folder)
    prompt = Prompt().add_image(folder, (1, 2, 2)).add_text(6)
    (item,) = prompt.items
    rows, span = prompt.make_rows([0]), slice(0, 5)
    gone = EncodeOrder(msgspec.structs.replace(item, path=f"{item.path}.gone"), np.arange(4, dtype=np.int32))
    with pytest.raises(RuntimeError, match="image is not readable any more; send the request again") as caught:
        rig.run_chunk(0, prompt, span, rows, orders=[gone])
    assert item.path not in str(caught.value)
    with pytest.raises(RuntimeError, match=r"modality image to \(4, 192\), and its prompt has 3 placeholders"):
        rig.run_chunk(1, prompt, span, rows, orders=[EncodeOrder(item, np.arange(3, dtype=np.int32))])
    tokens = rig.run_chunk(2, prompt, span, rows, orders=prompt.make_orders([0]))
    check(rig, prompt, tokens)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_layers_between_decodes(execution: str, folder: Path) -> None:
    """The rows appear with the last layers; decodes beside layers run in graphs."""
    rig, (image, text, _) = make_rig("interleaved", folder, execution), make_prompts(folder)
    model, replayed, replay = cast("Any", rig.runner.model), list[int](), rig.runner._replay
    outputs = [rig.run_chunk(1, text, slice(0, len(text.token_ids)), text.make_rows([]))[-1]]
    rig.runner._replay = lambda inputs: replayed.append(1) or replay(inputs)  # type: ignore[func-returns-value,method-assign]
    orders, table = image.make_orders([0]), rig.runner.inputs.media.table  # type: ignore[union-attr]
    for first, stop, layers in ((0, 2, 2), (2, 3, 3), (3, 0, NUM_LAYERS)):
        assert table is not None and not table.any()
        outputs += rig.decode([1], divide(orders, first, stop))
        assert model.num_passed == layers
    assert len(replayed) == (3 if execution == "graphs" else 0)
    first_tokens = rig.run_chunk(0, image, slice(0, len(image.token_ids)), image.make_rows([0]), [1])
    check(rig, text, [*outputs, first_tokens[0]])
    check(rig, image, [first_tokens[1], *rig.decode([0])])
    assert model.encoded == [("image", 1)]


def test_layers_that_are_lost_or_not_wanted(folder: Path) -> None:
    """A step that goes on with layers which a failed one has lost computes them again; those of an
    item whose request has ended are freed."""
    rig, (image, text, _) = make_rig("blocks", folder), make_prompts(folder)
    media, model = cast("Any", rig.runner.inputs.media), cast("Any", rig.runner.model)
    rig.run_chunk(1, text, slice(0, len(text.token_ids)), text.make_rows([]))
    orders = image.make_orders([0])
    rig.decode([1], divide(orders, 2, 4))
    assert model.num_passed == 4
    other = Prompt().add_image(folder, (1, 2, 2), 7)
    rig.decode([1], divide(other.make_orders([20]), 0, 1))
    assert (model.num_passed, model.num_closed) == (5, 1)
    rig.decode([1], divide(orders, 4, 0))  # nothing but the other item is known
    assert (model.num_passed, model.num_closed) == (5 + NUM_LAYERS, 2)
    check(rig, image, rig.run_chunk(0, image, slice(0, len(image.token_ids)), image.make_rows([0])))
    rig.decode([1], divide(orders, 0, 3))
    rig.decode([1])
    assert media._layers is not None
    rig.decode([1], divide(orders, -1, 0))
    assert media._layers is None
    assert model.num_closed == 3
    with pytest.raises(RuntimeError, match="image is not readable any more"):
        rig.decode([1], divide([EncodeOrder(msgspec.structs.replace(image.items[0], path="/gone"), orders[0].rows)], 0, 2))
    assert media._layers is None


def test_a_row_that_is_not_finite_stays_with_its_placeholders(folder: Path) -> None:
    rig = make_rig("interleaved", folder)
    media = rig.runner.inputs.media
    assert media is not None
    media.table[0].fill_(torch.nan)  # type: ignore[attr-defined]
    prompt = Prompt().add_image(folder, (1, 2, 2)).add_text(6)
    check(rig, prompt, rig.run_chunk(0, prompt, slice(0, 5), prompt.make_rows([1]), orders=prompt.make_orders([1])))


def test_drafters_embed_the_row_of_the_next_token(folder: Path) -> None:
    """In place of the embedding of a placeholder; the token after a chunk is not known."""
    rig = make_rig("interleaved", folder)
    inputs, batches = rig.runner.inputs, []
    build = inputs.build_forward_batch
    inputs.build_forward_batch = lambda *args, **more: batches.append(build(*args, **more)) or batches[-1]  # type: ignore[func-returns-value,method-assign]
    prompt, text = Prompt().add_text(7, 8).add_image(folder, (1, 3, 4)).add_text(9), Prompt().add_text(6)
    rows = prompt.make_rows([8])
    rig.run_chunk(4, text, slice(0, 1), text.make_rows([]))
    rig.run_chunk(6, prompt, slice(0, 10), rows, [4], prompt.make_orders([8]))
    batch, seen = batches[-1][0], []

    class Drafter:
        reads_next = True

        def forward(self, first: ForwardBatch, states: torch.Tensor) -> torch.Tensor:
            seen.append(first)
            return states

    runner = DraftRunner(cast("Any", SimpleNamespace(model=Drafter(), has_separate_backend=False)), 1)
    next_ids = torch.tensor([0, *prompt.token_ids[1:11]])
    sample = torch.tensor([0])
    tensors = cast("Any", SimpleNamespace(samples=sample, next_ids=next_ids, places=None))
    runner._fill(batch, torch.zeros(11, 2), torch.tensor([40]), sample[:0], tensors)
    (first,) = seen
    media = first.get(MediaRows)
    assert media.rows.tolist() == [-1, *rows[1:10].tolist(), -1]
    model: Any = rig.runner.model
    with torch.inference_mode():
        embedded, plain = model.embed_inputs(first), model.embed(first.token_ids)
    hidden = embedded.shape[1]
    is_next = media.rows >= 0
    assert is_next.sum() == 8
    assert torch.equal(embedded[is_next], media.table[media.rows[is_next], :hidden])
    assert torch.equal(embedded[~is_next], plain[~is_next])


def test_the_memory_of_the_encoder_is_planned(folder: Path) -> None:
    runner = make_rig("interleaved", folder).runner
    context, width = runner.context, runner.model.encoder_width  # type: ignore[attr-defined]
    assert context.media is not None
    table, patches = context.media.table_rows * width * 4, context.media.step_patches * 4
    config = {"text_config": {"hidden_size": 10**9}, "thinker_config": {"vision_config": {"hidden_size": 32, "intermediate_size": 80}}}
    assert count_bytes(runner.model, context, {}) == table + patches * width
    assert count_bytes(runner.model, context, config) == table + patches * (width + 8 * 32 + 4 * 80)
    assert count_bytes(runner.model, replace(context, media=None), config) == 0
    held = replace(context, media=replace(context.media, held_patches=1000))
    assert count_bytes(runner.model, held, config) - count_bytes(runner.model, context, config) == 4 * 1000 * (4 * 32 + width // 4)


def test_an_adapter_begins_at_the_position_of_its_token() -> None:
    tables = _SlotTables.empty(3, torch.device("cpu"))
    ids = np.zeros(20, np.int32)
    for slot, start in ((0, 15), (1, 0)):
        setup = SlotSetup(slot, SamplingParams(), 0, 20, ids, adapter=2, adapter_start=start, position_offset=-12)
        tables.update(cast("Any", SimpleNamespace(released=[], setups=[setup])))
    places = torch.empty(4, dtype=torch.int32)
    tables.find_places(torch.tensor([0, 0, 0, 1]), torch.tensor([14, 15, 16, 0]) + torch.tensor([-12, -12, -12, 0]), places)
    assert places.tolist() == [-1, 2, 2, 2]
