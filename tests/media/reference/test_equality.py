"""Greedy tokens of prompts with media equal those of transformers, in all forms in which an engine
computes them: chunks, hits, preemption, drafts, ranks and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from frame.core.messages import Generate
from frame.entrypoints.offline.collector import SequenceOutput
from tests.media.reference.drafters import add_draft_layer
from tests.media.reference.prompts import (
    Prompt,
    continue_chat,
    make_chat,
    make_files_chat,
    make_image,
    make_mixed_chats,
    make_prompts,
    make_sound,
    make_video,
)  # fmt: skip
from tests.media.reference.serving import Checkpoint, Key, count_common, greedy, list_keys, prepare, run
from tests.models.media_checkpoints import FAMILIES, make_media_checkpoint

NUM_TOKENS = 64
IMAGES = [name for name, family in FAMILIES.items() if "image" in family.placeholders]
VIDEOS = [name for name in IMAGES if "video" in FAMILIES[name].placeholders]
SOUNDS = [name for name, family in FAMILIES.items() if "audio" in family.placeholders]
MIXED = ["Qwen3OmniMoeThinkerForConditionalGeneration", "Gemma4ForConditionalGeneration", "Gemma4ForConditionalGeneration-spans"]
# with pages of one token, all that earlier prompts have is hit; others have states or windows
EXACT = [name for name in IMAGES if not name.startswith(("Qwen3_5", "Gemma", "Llama4", "MiniCPM"))]
DRAFTED = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
FILE_SETTINGS = ("default", "chunks of 16, pages of 1", "chunks of 64, pages of 16", "ngram", "tp 2", "pp 2")
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 16, pages of 1": {"chunked_prefill_size": 16, "page_size": 1},
    "chunks of 64, pages of 16": {"chunked_prefill_size": 64, "page_size": 16, "overlap": False},
    "chunks of 16, pages of 64": {"chunked_prefill_size": 16, "page_size": 64},
    "preemption": {"max_total_tokens": 448, "max_running_requests": 8, "chunked_prefill_size": 32, "max_model_len": 320},
    "no prefix cache": {"prefix_cache": "none", "chunked_prefill_size": 16},
    "small table": {"media_table_rows": 128, "chunked_prefill_size": 64},
    "small budget": {"media_encode_budget": 12},  # beside decodes, items are encoded by layers
    "ngram": {"speculative_algorithm": "ngram", "speculative_adaptive": False, "chunked_prefill_size": 16},
    "suffix": {"speculative_algorithm": "suffix", "page_size": 1},
    "tp 2": {"tp": 2, "chunked_prefill_size": 16},
    "pp 2": {"pp": 2, "chunked_prefill_size": 16},
}  # fmt: skip
ALWAYS = {
    ("Qwen2_5_VLForConditionalGeneration", "chunks of 16, pages of 1"),
    ("Qwen3VLForConditionalGeneration", "ngram"),
    ("Gemma3ForConditionalGeneration", "chunks of 64, pages of 16"),
    ("InternVLForConditionalGeneration", "preemption"),
    ("Qwen3VLForConditionalGeneration", "small budget"),
    ("Gemma3ForConditionalGeneration", "small budget"),
    ("Gemma4ForConditionalGeneration", "chunks of 16, pages of 1"),
    ("Llama4ForConditionalGeneration", "chunks of 16, pages of 1"),
    ("Gemma4ForConditionalGeneration-spans", "chunks of 64, pages of 16"),
}
MIN_CHUNKS = {"Gemma4ForConditionalGeneration-spans": 72}  # one step computes an image of up to 70 tokens
Made = Callable[[str], Checkpoint]


def make_cases(architectures: list[str], names: list[str], always: Set[tuple[str, str]] = ALWAYS) -> list[Any]:
    return [
        pytest.param(architecture, name, marks=[] if (architecture, name) in always else pytest.mark.soak, id=f"{architecture}-{name}")
        for architecture in architectures
        for name in names
        if not (architecture.startswith("Gemma4") and name == "pp 2")  # whose later layers read keys of earlier ones
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """The checkpoint of an architecture."""
    known: dict[str, Checkpoint] = {}

    def get(architecture: str) -> Checkpoint:
        if architecture not in known:
            folder = make_media_checkpoint(tmp_path_factory.mktemp(architecture), architecture)
            known[architecture] = Checkpoint(folder, NUM_TOKENS, MIN_CHUNKS.get(architecture, 0))
        return known[architecture]

    yield get
    for checkpoint in known.values():
        checkpoint.close()


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "settings"), make_cases(IMAGES, list(SETTINGS)))
def test_images(architecture: str, settings: str, made: Made) -> None:
    """All prompts at once, each twice, and again with what the first pass cached."""
    checkpoint = made(architecture)
    prompts = [prompt for prompt in make_prompts(architecture) for _ in range(2)]
    with checkpoint.open_engine(**SETTINGS[settings]) as engine:
        passes = [run(engine, prompts, greedy(NUM_TOKENS)) for _ in range(2)]
        engine.control("check_integrity")
        info = engine.control("server_info")
        for outputs in passes:
            checkpoint.expected.check(engine, prompts, outputs)
    assert settings != "preemption" or info["preempted"] > 0
    is_held = not architecture.startswith("Gemma4")  # whose pictures all have more patches than the device holds at this budget
    assert settings != "small budget" or info["media_divided"] > 0 or not is_held
    assert settings not in ("ngram", "suffix") or info["drafted_tokens"] > 0
    assert settings in ("no prefix cache", "chunks of 16, pages of 64") or sum(output.cached_tokens for output in passes[1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[] if name == "InternVLForConditionalGeneration" else pytest.mark.soak) for name in IMAGES]
)
def test_hits(architecture: str, made: Made) -> None:
    """Prompts one after the other hit what a dictionary of earlier ones says: before, inside of and
    after an image, and nothing of an image of equal size."""
    checkpoint = made(architecture)
    first, second, other = make_image(1), make_image(2), make_image(3)
    start = make_chat("look at", first, "and", second, "say", name="start")
    prompts = [
        start,
        make_chat("look at", other, "and", second, "say", name="another first image"),
        make_chat("look at", first, "and", other, "say", name="another last image"),
        make_chat("look at", first, "but", second, "say", name="another text after an image"),
        make_chat("see", first, "and", second, "say", name="another text before an image"),
        continue_chat(start, "they differ", "and this", other, "?", name="and another image"),
        continue_chat(start, "they differ", "and this", first, "?", name="and the first image"),
        start,
    ]
    written = FAMILIES[architecture].placeholders["image"]
    ends = Prompt("an image at the end", {"prompt": f"this is {written}", "image": first}, (first,))
    prompts += [ends, ends]
    with checkpoint.open_engine(page_size=1, chunked_prefill_size=16) as engine:
        earlier: list[list[Key]] = []
        for prompt in prompts:
            keys = list_keys(engine, prompt)
            (output,) = run(engine, [prompt], greedy(NUM_TOKENS))
            checkpoint.expected.find(engine, prompt).check(output.token_ids, prompt.name)
            longest = max((count_common(keys, each) for each in earlier), default=0)
            bound = min(longest, len(keys) - 1)
            if architecture in EXACT:
                assert output.cached_tokens == bound, prompt.name
            assert output.cached_tokens <= bound, prompt.name
            earlier.append(keys + list(output.token_ids))
        engine.control("check_integrity")


@pytest.mark.soak
@pytest.mark.parametrize("architecture", IMAGES)
def test_parallel_sequences(architecture: str, made: Made) -> None:
    """Four sequences of each prompt, beside prompts of one."""
    checkpoint, prompts = made(architecture), make_prompts(architecture)
    params = [greedy(NUM_TOKENS, n=1 + 3 * (number % 2)) for number in range(len(prompts))]
    with checkpoint.open_engine(chunked_prefill_size=16, page_size=16) as engine:
        outputs = run(engine, prompts, params)
        engine.control("check_integrity")
        checkpoint.expected.check(engine, prompts, outputs)
    assert [len(output.outputs) for output in outputs[1::2]] == [4] * (len(prompts) // 2)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", IMAGES)
def test_prompt_logprobs(architecture: str, made: Made) -> None:
    """Also those of placeholders, and of the texts after them."""
    checkpoint = made(architecture)
    prompts = make_prompts(architecture)
    with checkpoint.open_engine(chunked_prefill_size=16) as engine:
        for outputs in (run(engine, prompts, greedy(1, prompt_logprobs=0)) for _ in range(2)):
            for prompt, output in zip(prompts, outputs, strict=True):
                with prepare(engine, prompt) as (ids, items):
                    scores = checkpoint.reference.score(prompt, ids, items)
                for place in range(1, len(ids)):
                    difference = output.prompt_logprobs.logprobs[place] - float(scores[place - 1, ids[place]])
                    assert abs(difference) < 1e-3, (prompt.name, place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "architecture", "settings"),
    [
        pytest.param(kind, *case.values, marks=case.marks, id=f"{kind}-{case.id}")
        for kind, names in (("video", VIDEOS), ("audio", SOUNDS))
        for case in make_cases(names, list(FILE_SETTINGS), ALWAYS | {("InternVLForConditionalGeneration", "chunks of 64, pages of 16")})
    ],
)
def test_videos_and_sounds(kind: str, architecture: str, settings: str, made: Made) -> None:
    checkpoint = made(architecture)
    if kind == "audio":
        files = [make_sound(1, 1.3), make_sound(2, 0.7), make_sound(3, 1.3)]
    else:
        seconds = 2.0 if architecture.startswith("Llava") else 3.0  # transformers takes videos of an equal number of frames at once
        files = [make_video(1), make_video(2, seconds, width=80), make_video(3)]
    prompts = [
        make_files_chat(kind, "take", files[0], "say", name="one"),
        make_files_chat(kind, "take", files[2], "say", name="another of equal length"),
        make_files_chat(kind, files[0], "and", files[1], "and", files[2], "say", name="three"),
        make_files_chat(kind, "once", files[0], "twice", files[0], "say", name="one twice"),
    ]
    with checkpoint.open_engine(**SETTINGS[settings] | {"max_model_len": 2048, "max_total_tokens": 8192}) as engine:
        assert kind in engine.modalities
        for _ in range(2):
            outputs = run(engine, [*prompts, *prompts], greedy(NUM_TOKENS))
            checkpoint.expected.check(engine, [*prompts, *prompts], outputs)
        engine.control("check_integrity")


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "settings"), make_cases(MIXED, list(SETTINGS), {(MIXED[0], "chunks of 16, pages of 1")}))
def test_modalities_beside_each_other(architecture: str, settings: str, made: Made) -> None:
    """Images, videos and sounds of one prompt; four sequences of every other prompt."""
    checkpoint, prompts = made(architecture), make_mixed_chats()
    params = [greedy(NUM_TOKENS, n=1 + 3 * (number % 2)) for number in range(len(prompts))]
    with checkpoint.open_engine(**SETTINGS[settings]) as engine:
        assert set(engine.modalities) == {"image", "video", "audio"}
        for _ in range(2):
            checkpoint.expected.check(engine, prompts, run(engine, prompts, params))
        assert settings != "preemption" or engine.control("server_info")["preempted"] > 0
        engine.control("check_integrity")


@pytest.mark.soak
@pytest.mark.parametrize("architecture", DRAFTED)
@pytest.mark.parametrize("settings", ["default", "chunks of 16, pages of 1", "preemption"])
def test_layers_that_draft(architecture: str, settings: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_media_checkpoint(tmp_path / "model", architecture), NUM_TOKENS)
    add_draft_layer(checkpoint.folder, 1)
    prompts = make_prompts(architecture)
    try:
        with checkpoint.open_engine(**SETTINGS[settings], speculative_algorithm="mtp", speculative_adaptive=False) as engine:
            for _ in range(2):
                checkpoint.expected.check(engine, prompts, run(engine, prompts, greedy(NUM_TOKENS)))
            assert engine.control("server_info")["drafted_tokens"] > 0
            engine.control("check_integrity")
    finally:
        checkpoint.close()


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "InternVLForConditionalGeneration"])
def test_tenants_share_nothing(architecture: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of two tenants: each encodes its image, and hits its own tokens alone."""
    checkpoint, create, tenants = made(architecture), SequenceOutput.create_message, iter(("first:", "second:") * 2)

    def create_for_tenant(sequence: SequenceOutput, deadline: float | None) -> Generate:
        return msgspec.structs.replace(create(sequence, deadline), namespace=next(tenants))

    monkeypatch.setattr(SequenceOutput, "create_message", create_for_tenant)
    prompt = make_chat("look at", make_image(1), "say", name="one image of two tenants")
    with checkpoint.open_engine(page_size=1) as engine:
        cached, encoded = [], []
        for _ in range(4):
            (output,) = run(engine, [prompt], greedy(NUM_TOKENS))
            checkpoint.expected.check(engine, [prompt], [output])
            cached.append(output.cached_tokens)
            encoded.append(engine.control("server_info")["media_encoded"])
        length = len(list_keys(engine, prompt))
    assert cached == [0, 0, length - 1, length - 1]
    assert encoded == [1, 2, 2, 2]


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_adapters(architecture: str, made: Made, tmp_path: Path) -> None:
    """A prompt with an image under an adapter, beside the same one under none."""
    from peft import LoraConfig, get_peft_model

    checkpoint = made(architecture)
    adapted = Checkpoint(checkpoint.folder, NUM_TOKENS)
    model = adapted.reference.model
    torch.manual_seed(1)
    targets = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"
    tuned: Any = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter")
    prompts = make_prompts(architecture)[:4]
    keys = {"enable_lora": True, "lora_modules": (f"tuned={tmp_path / 'adapter'}",), "page_size": 1, "chunked_prefill_size": 16}
    with checkpoint.open_engine(**keys) as engine:
        for _ in range(2):
            outputs = run(engine, [each for each in prompts for _ in range(2)], greedy(NUM_TOKENS), lora=["tuned", None] * len(prompts))
            adapted.expected.check(engine, prompts, outputs[::2])
            checkpoint.expected.check(engine, prompts, outputs[1::2])
    assert [output.token_ids for output in outputs[::2]] != [output.token_ids for output in outputs[1::2]]
