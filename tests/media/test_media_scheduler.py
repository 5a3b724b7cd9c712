"""Media in the scheduler: refusals, budgets, rows, hits, failed steps and drafts."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.media import MediaItem, PlaceholderRun
from frame.core.messages import Generate
from frame.core.scheduling.step_features import NoMedia
from frame.interfaces.modality import EncoderCost, MediaPlan
from frame.testing.scheduler_rig import InOrder
from tests.core.scheduling.small_rig import config, params, prompt
from tests.media.media_rig import FAILED, MediaRig, make_item

PLACEHOLDER = 100
FEW = params(max_tokens=2)


def make_rig(table_rows: int = 64, encode_budget: int = 64, *, whole: bool = False, rotary: bool = False, **changes: Any) -> MediaRig:
    plan = MediaPlan(table_rows=table_rows, encode_budget=encode_budget, modalities=("image",), whole_items=whole, rotary_positions=rotary)
    return MediaRig(plan, config(**changes), InOrder())


def with_image(name: str, count: int = 8, before: int = 4, after: int = 4, patches: int | None = None) -> tuple[list[int], list[MediaItem]]:
    tokens = [*prompt(before), *[PLACEHOLDER] * count, *prompt(after, 50)]
    return tokens, [make_item(name, PlaceholderRun(before, count), patches=patches)]


def run_in_turn(rig: MediaRig, *requests: tuple[list[int], list[MediaItem]]) -> list[int | None]:
    """The cached tokens of these requests, each after the one before."""
    for tokens, items in requests:
        rig.add(tokens, FEW, media=items)
        while not rig.scheduler.is_idle:
            rig.step()
    rig.check()
    return [request.cached for request in rig.requests.values()]


def refusal(rig: MediaRig, tokens: list[int], items: list[MediaItem], **fields: Any) -> str:
    finish = rig.scheduler.add_request(Generate(rid="r", token_ids=tokens, params=params(max_tokens=9), media=items, **fields))
    assert finish is not None
    assert finish.code == "invalid_request"
    assert finish.param == "messages"
    return finish.error or ""


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (make_item("x", PlaceholderRun(18, 4)), "outside of the prompt"),
        (make_item("x", PlaceholderRun(2, 4), PlaceholderRun(5, 2)), "overlap"),
        (make_item("x", PlaceholderRun(2, 0)), "overlap others or lie outside"),
        (make_item("x", PlaceholderRun(2, 4, (1, 2, 3))), "4 placeholders for a grid of 1 x 2 x 3"),
        (make_item("x", PlaceholderRun(2, 4, (4, 1, 1), float("nan"))), "a frame step of nan"),
        (make_item("x"), "has no placeholders"),
        (MediaItem("image", b"short", [PlaceholderRun(2, 4)], 4, "", []), "no digest of 32 bytes"),
        (make_item("x", PlaceholderRun(2, 4), modality="audio"), "reads no audio; it reads image"),
        (make_item("x", PlaceholderRun(2, 17)), "needs 17 rows of the encoders' output, and the table holds 16"),
    ],
)
def test_items_that_cannot_be_served_are_refused(item: MediaItem, sentence: str) -> None:
    assert sentence in refusal(make_rig(table_rows=16), prompt(20), [item])


def test_positions_end_at_the_context() -> None:
    """Those of a video with long pauses are ahead of its tokens."""
    tokens = [*prompt(4), *[PLACEHOLDER] * 4, *prompt(4, 50)]

    def make_video(step: float) -> MediaItem:
        return make_item("x", PlaceholderRun(4, 4, (4, 1, 1), step))

    rig = make_rig(rotary=True, max_context=72)
    assert "the prompt's media take 72 positions by their length and size, and the context holds 72" in refusal(
        rig, tokens, [make_video(21.0)]
    )
    for step, count in ((20.0, 3), (18.0, 9)):  # the answer begins at the position 9 + 3 * step
        rid = f"r{step}"
        sent = Generate(rid=rid, token_ids=tokens, params=params(max_tokens=9), media=[make_video(step)])
        assert rig.scheduler.add_request(sent) is None
        assert rig.scheduler._requests[rid].max_new_tokens == count


def test_items_do_not_lie_in_the_output() -> None:
    tokens, items = with_image("x")
    assert "outside of the prompt" in refusal(make_rig(), tokens, items, output_len=6)


def test_a_server_of_text_refuses_media() -> None:
    rig = make_rig()
    rig.scheduler._planner.media = NoMedia()
    assert "reads text alone" in refusal(rig, *with_image("x"))


def test_an_item_that_a_step_cannot_hold_whole_is_refused() -> None:
    rig = make_rig(whole=True, token_budget=10)
    assert "serve with --chunked-prefill-size 12" in refusal(rig, *with_image("x", 12))
    rig.add(*with_image("x", 10)[:1], FEW, media=with_image("x", 10)[1])
    rig.run()


def test_an_item_is_encoded_once_for_several_requests() -> None:
    rig = make_rig()
    for _ in range(3):
        tokens, items = with_image("x")
        rig.add(tokens, FEW, media=items)
    rig.run()
    assert len(rig.encoded) == 1
    assert rig.scheduler.get_load()["media_encoded"] == 1


def test_nothing_is_shared_between_tenants() -> None:
    rig = make_rig()
    for namespace in ("a:", "b:", "b:"):
        tokens, items = with_image("x")
        rig.add(tokens, FEW, namespace=namespace, media=items)
    rig.run()
    assert len(rig.encoded) == 2


def test_other_images_do_not_hit_and_equal_ones_do() -> None:
    cached = run_in_turn(make_rig(page_size=1), *(with_image(name) for name in "xyx"))
    assert cached == [0, 4, 15]  # the text before the image; all but the last token


def test_a_hit_inside_an_item_encodes_it_again_if_it_is_gone() -> None:
    rig = make_rig(table_rows=8, page_size=8, num_pages=40)
    assert run_in_turn(rig, *(with_image(name, after=1) for name in "xyx")) == [0, 0, 8]
    assert len(rig.encoded) == 3


def test_a_step_encodes_within_its_budget_and_a_large_item_alone() -> None:
    rig = make_rig(encode_budget=10)
    for name, patches in (("x", 6), ("y", 6), ("z", 30)):  # the rig checks the sum of each step
        tokens, items = with_image(name, patches=patches)
        rig.add(tokens, FEW, media=items)
    rig.run()
    assert len(rig.encoded) == 3


def test_a_new_item_takes_no_rows_of_another_that_its_chunk_reads() -> None:
    """The least recently used rows go first; those of the chunk's own items are kept."""
    rig = make_rig(table_rows=16, encode_budget=10, max_context=40, token_budget=32)
    for name in "xy":
        run_in_turn(rig, with_image(name, 6, patches=6))
    tokens = [*[PLACEHOLDER] * 6, 1, *[PLACEHOLDER] * 6, 2]
    rig.add(tokens, FEW, media=[make_item("z", PlaceholderRun(0, 6), patches=6), make_item("x", PlaceholderRun(7, 6), patches=6)])
    rig.run()  # the rig checks the budget of each step
    assert len(rig.encoded) == 3


def test_small_items_do_not_delay_a_large_one_for_ever() -> None:
    """A request that waits for the encoder has its turn before new ones."""
    rig = make_rig(encode_budget=10, max_running=4, token_budget=32, num_pages=129)
    rig.add(*with_image("large", patches=30)[:1], FEW, media=with_image("large", patches=30)[1])
    for number in range(6):
        tokens, items = with_image(str(number), patches=10)
        rig.add(tokens, FEW, media=items)
    rig.run()
    assert rig.encoded[0] == with_image("large")[1][0].digest


def test_a_held_item_is_encoded_again_after_a_failed_step() -> None:
    """Of another request: the step has no row of the one that is between two chunks of its item."""
    rig = make_rig(token_budget=8, short_prompt_share=0.0)
    tokens, items = with_image("x", 12)
    rig.add(tokens, FEW, media=items)
    rig.step()
    held = next(iter(rig.media._table._items.values()))
    assert held.num_readers == 1
    assert held.is_encoded
    assert rig.media.fail_step(100, rig.scheduler._running.requests) == []
    rig.run()
    assert len(rig.encoded) == 2


def test_rows_that_a_failed_step_did_not_encode_void_later_steps() -> None:
    rig = make_rig(overlap=True, max_running=4)
    rig.fails_next = True
    for number in range(2):
        tokens, items = with_image("x", before=4 + number)
        rig.add(tokens, FEW, media=items)
        rig.step()  # the second request reads the rows in the step after
    rig.run()
    assert len(rig.encoded) >= 2
    assert all(request.finish is not None for request in rig.requests.values())


COST = EncoderCost(num_layers=6, patch=4.0, pair=0.0)


def make_streams(
    *, cost: EncoderCost = COST, token_budget: int = 32, encode_budget: int = 64, table_rows: int = 64, max_tokens: int = 30, **changes: Any
) -> MediaRig:
    """A rig with a request that decodes."""
    plan = MediaPlan(table_rows=table_rows, encode_budget=encode_budget, modalities=("image",), costs={"image": cost})
    rig = MediaRig(plan, config(token_budget=token_budget, num_pages=129, max_running=4, **changes), InOrder())
    rig.add(prompt(3), params(max_tokens=max_tokens))
    rig.step()
    return rig


def advance(rig: MediaRig) -> ScheduledBatch:
    batch = rig.scheduler.schedule_batch(rig.now)
    assert batch is not None
    rig._in_flight.append((batch, rig.runner.launch(batch)))
    rig.commit()
    return batch


def add_image(rig: MediaRig, name: str = "x", patches: int = 24, before: int = 4) -> str:
    tokens, items = with_image(name, before=before, patches=patches)
    return rig.add(tokens, FEW, media=items)


def test_a_large_item_is_divided_beside_decodes() -> None:
    """It costs 96 tokens, and a step takes 32: two layers each. No step has prompts beside them
    but the first, and each has a token of the stream."""
    rig = make_streams()
    add_image(rig)
    parts = []
    for _ in range(5):
        batch = advance(rig)
        assert batch.num_decodes == 1
        parts.append([(order.first_layer, order.stop_layer) for order in batch.encodes] or len(batch.token_ids))
    # the text before the image takes 4 of the 32 tokens
    assert parts == [[(0, 1)], [(1, 3)], [(3, 5)], [(5, 0)], 12]
    rig.run()
    assert rig.scheduler.get_load()["media_divided"] == rig.scheduler.get_load()["media_encoded"] == 1


def test_a_step_without_decodes_divides_nothing_and_ends_a_division() -> None:
    rig = make_streams()
    add_image(rig)
    rig.step()
    rig.scheduler.abort(["request-0"])
    rig.step()
    assert (rig.num_parts, len(rig.encoded)) == (2, 1)
    rig.run()
    assert rig.media._num_encoded == 1
    assert rig.media._num_divided == 0


def test_prompts_leave_a_quarter_to_layers() -> None:
    rig = make_streams()
    add_image(rig)
    rig.add(prompt(40), FEW)
    seen = []
    for _ in range(3):
        batch = advance(rig)
        seen.append((len(batch.token_ids), [order.stop_layer - order.first_layer for order in batch.encodes]))
    assert seen == [(32, [1]), (12, [1]), (0, [2])]
    rig.run()


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_a_division_that_ends_early_leaves_nothing(how: str) -> None:
    rig = make_streams()
    rid = add_image(rig)
    rig.step()
    held = rig.media._division
    assert held is not None and rig.layers == (held.item.digest, 1)
    if how == "abort":
        rig.scheduler.abort([rid])
    elif how == "preempt":
        request = next(each for each in rig.scheduler._running.requests if each.rid == rid)
        rig.scheduler._planner.preempt(request)
        rig.scheduler.abort([rid])
    else:
        rig.fails_next = True
        rig.step()
        rig.scheduler.abort([rid])
    assert rig.media._division is None
    assert rig.media._table.num_used_rows == 0
    rig.step()
    assert rig.layers is None
    rig.run()


def test_one_item_is_divided_at_a_time() -> None:
    """Also where two requests have it; the next one waits for rows and layers."""
    rig = make_streams(max_context=60)
    for name in "xxy":
        add_image(rig, name)
    rig.run()
    assert rig.media._num_divided == 2
    assert len(rig.encoded) == 2


@pytest.mark.parametrize("second", "xz")
def test_small_items_do_not_wait_for_a_divided_one(second: str) -> None:
    """Nor for a second request that has it, or for another large one."""
    rig = make_streams(max_context=60)
    for name, patches in (("x", 24), (second, 24), ("y", 1)):
        add_image(rig, name, patches)
    advance(rig)
    assert with_image("y")[1][0].digest in rig.encoded
    rig.run()


def test_an_item_that_has_its_rows_does_not_wait_for_one_that_waits_for_rows() -> None:
    """The table holds one of two large items, while a stream goes on."""
    rig = make_streams(max_context=100, table_rows=12, max_tokens=80)
    for name in "xz":
        add_image(rig, name, patches=24)
    for _ in range(40):
        advance(rig)
    assert len(rig.encoded) == 2
    rig.run()


def test_small_items_are_encoded_whole_within_the_time_of_a_step() -> None:
    rig = make_streams()
    for name in "xyz":
        add_image(rig, name, patches=4)
    batch = advance(rig)
    assert [(order.item.patches, order.stop_layer) for order in batch.encodes] == [(4, 0), (4, 0)]
    rig.run()
    assert rig.num_parts == 0


def test_an_item_above_what_the_device_may_hold_is_encoded_whole() -> None:
    rig = make_streams(encode_budget=8)
    add_image(rig, patches=33)
    rig.run()
    assert (rig.num_parts, len(rig.encoded)) == (0, 1)


def test_the_request_of_a_divided_item_is_retried_alone_and_no_stream_ends() -> None:
    """Its item fails after its first layers: beside a stream, which is the only row of the step,
    and alone."""
    rig = make_streams()
    rid = add_image(rig, before=0)
    launch = rig.runner.launch

    def fail_encodes(batch: Any) -> Any:
        rig.fails_next = any(order.first_layer > 0 or not order.stop_layer for order in batch.encodes)
        return launch(batch)

    rig.runner.launch = fail_encodes  # type: ignore[method-assign]
    rig.run()
    finishes = {each: request.finish for each, request in rig.requests.items()}
    assert finishes[rid] is not None and finishes[rid].error == FAILED
    assert finishes["request-0"] is not None and finishes["request-0"].error is None
    assert rig.num_parts == 2


def test_the_latency_budget_counts_what_is_encoded() -> None:
    noted = list[float]()
    rig = make_streams()
    rig.media._note_encoded = noted.append
    add_image(rig)
    rig.run()
    assert noted == [16.0, 32.0, 32.0, 16.0]


def test_updated_weights_encode_again() -> None:
    rig = make_rig(page_size=1)
    assert run_in_turn(rig, with_image("x")) == [0]
    rig.scheduler.change_weights(keeps_running=False)
    assert run_in_turn(rig, with_image("x")) == [0, 0]
    assert len(rig.encoded) == 2


def test_placeholders_are_not_drafted() -> None:
    """A drafter that copies its context is cut, and goes on."""
    rig = make_rig(num_pages=129)
    seen = list[list[int]]()

    def copy(setup: Any, tokens: Any, maximum: int) -> list[int]:
        seen.append(list(tokens))
        return list(tokens[4:7])

    rig.enable_drafts(copy, 3)
    for name in ("x", "y"):
        tokens, items = with_image(name)
        rig.add(tokens, params(max_tokens=6), media=items)
    rig.run()
    assert rig.scheduler.speculation.is_active
    assert rig.scheduler.get_load()["drafted_tokens"] == 0
    assert len({tokens[4] for tokens in seen}) == 2  # keys, not the id of the placeholder
    assert all(token < 0 for tokens in seen for token in tokens[4:12])


def test_positions_of_decodes_have_an_offset() -> None:
    rig = make_rig(rotary=True, token_budget=5, short_prompt_share=0.0, overlap=True)
    items = [make_item("x", PlaceholderRun(3, 6, (1, 2, 3)), PlaceholderRun(11, 4, (2, 2, 1), 2.0))]
    rig.add([*prompt(3), *[PLACEHOLDER] * 6, *prompt(2), *[PLACEHOLDER] * 4, *prompt(2)], FEW, media=items)
    batch = rig.scheduler.schedule_batch(0.0)
    assert batch is not None
    assert batch.setups[0].position_offset == -4
    rig._in_flight.append((batch, rig.runner.launch(batch)))
    rig.run()


def test_steps_of_text_carry_nothing() -> None:
    rig = make_rig(rotary=True, whole=True, overlap=True)
    rig.add(prompt(12), FEW)
    batch = rig.scheduler.schedule_batch(0.0)
    assert batch is not None
    assert (batch.encodes, batch.media_rows, batch.rotary_positions, batch.media_spans) == ([], None, None, None)
    rig._in_flight.append((batch, rig.runner.launch(batch)))
    rig.run()


def test_steps_beside_decodes_are_bounded_at_nine_tenths_of_the_load() -> None:
    """An image costs 96 tokens and has a prompt of 16, and time goes on by what a step has: no step
    has more than a third of an image and a prompt's chunk, and no image waits for ever."""
    rig = make_streams(cost=EncoderCost(num_layers=24, patch=4.0, pair=0.0), table_rows=256, max_tokens=200, max_context=300)
    time, sent, seen = 0.0, 0, list[tuple[float, int]]()
    while sent < 12 or len(rig.encoded) < 12:
        while sent < 12 and sent * (96 + 16 + 5 * 4) / 0.9 <= time:  # five steps an image
            add_image(rig, f"image-{sent}")
            sent += 1
        batch = advance(rig)
        assert batch.num_decodes >= 1
        layers = sum((order.stop_layer or 24) - order.first_layer for order in batch.encodes if order.first_layer >= 0)
        seen.append((layers * 96 / 24, len(batch.token_ids)))
        time += sum(seen[-1]) + 4
    assert max(encoded for encoded, _ in seen) == 32
    assert max(encoded + tokens for encoded, tokens in seen) <= 32 + 8
    rig.run()
    assert rig.media._num_divided == 12
