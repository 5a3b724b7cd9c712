"""Greedy tokens of prompts whose beginning is in the prefix cache equal those of an engine without
one, for prefixes whose lengths are at and around the ends of pages, windows, chunks and stored
states.

The long form (`soak`) draws 10,000 lengths for a model of each kind of cache group.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from frame.core.interfaces.media import MediaItem
from frame.testing.checkpoints import make_checkpoint
from tests.core import greedy
from tests.tiny_whisper import MELS, POSITIONS, make_items, make_whisper

ENCODED = "write_once"
KINDS = {  # an architecture for each kind of group
    "tokens": "LlamaForCausalLM",
    "latents": "DeepseekV3ForCausalLM",
    "window": "Gemma3ForCausalLM",
    "window and sinks": "GptOssForCausalLM",
    "chunked attention": "Llama4ForCausalLM",
    "snapshot, gated DeltaNet": "Qwen3NextForCausalLM",
    "snapshot, Mamba-2": "NemotronHForCausalLM",
    "snapshot beside tokens": "FalconH1ForCausalLM",
    "snapshot, KDA": "KimiLinearForCausalLM",
    "sidecar": "DeepseekV32ForCausalLM",
    ENCODED: "WhisperForConditionalGeneration",
}
WINDOW, PAGE, CHUNK = 24, 4, 16
MAX_LENGTH, TOKENS, ROWS = 120, 3, 16  # of a prefix; of an output; requests at once


def draw_lengths(numbers: random.Random, count: int) -> Iterator[int]:
    """Half of the lengths are within two tokens of a multiple of a page, a window or a chunk."""
    for _ in range(count):
        near = numbers.choice((PAGE, WINDOW, CHUNK, WINDOW + CHUNK))
        edge = near * numbers.randrange(1, MAX_LENGTH // near + 1) + numbers.randrange(-2, 3)
        yield min(MAX_LENGTH, max(1, edge if numbers.random() < 0.5 else numbers.randrange(1, MAX_LENGTH)))


def compare(kind: str, scratch: Path, count: int) -> int:
    """Tokens of `count` prompts that came from the prefix cache. Each prompt is a beginning of a
    text that the cache holds, and a random end. Encoder inputs: usually the text's, else another
    text's, whose states the prompt must not take."""
    folder = str(make_whisper(scratch) if kind == ENCODED else make_checkpoint(KINDS[kind], scratch))
    warm, cold = (greedy.make_loop(folder, 4096, page_size=PAGE, chunk=CHUNK, prefix=prefix) for prefix in ("radix", "none"))
    numbers, params, texts = random.Random(11), greedy.greedy(TOKENS), list[list[int]]()
    noise, inputs = np.random.default_rng(11), list[list[MediaItem]]()
    lengths = list(draw_lengths(numbers, count))
    for first in range(0, count, ROWS):
        if first % (ROWS * 8) == 0:  # more texts than the cache has room for
            texts = draw_texts(numbers)
            features = [noise.standard_normal((MELS, 2 * POSITIONS), np.float32) for _ in texts]
            inputs = make_items(scratch, features) if kind == ENCODED else [[] for _ in texts]
            warm.generate(texts, params, inputs)
        drawn = lengths[first : first + ROWS]
        chosen = [numbers.randrange(len(texts)) for _ in drawn]
        prompts = [texts[text][:length] + random_ids(numbers, numbers.randrange(1, 6)) for text, length in zip(chosen, drawn, strict=True)]
        given = [inputs[text if numbers.random() < 0.8 else numbers.randrange(len(texts))] for text in chosen]
        assert warm.generate(prompts, params, given) == cold.generate(prompts, params, given), (kind, drawn)
        warm.scheduler.check_integrity()
    assert cold.stats["cached"] == 0
    return warm.stats["cached"]


def random_ids(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(6, 384) for _ in range(count)]


def draw_texts(numbers: random.Random) -> list[list[int]]:
    return [random_ids(numbers, MAX_LENGTH + 4) for _ in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "snapshot, gated DeltaNet", "sidecar", ENCODED])
def test_a_hit_changes_no_token(kind, tmp_path):
    assert compare(kind, tmp_path, 4 * ROWS) > 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_hits_change_no_token(kind, tmp_path):
    cached = compare(kind, tmp_path, 10_000)
    print(f"{kind}: {cached} tokens of 10,000 prompts came from the cache")
    assert cached > 10_000
