"""Models with encoders that have no plugin of their own: greedy tokens equal those of
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.media.reference.prompts import make_prompts
from tests.media.reference.serving import Checkpoint, greedy, run
from tests.models.fallback_families import FALLBACK_FAMILIES
from tests.models.media_checkpoints import make_media_checkpoint

NUM_TOKENS = 32
CHUNKS = {"chunked_prefill_size": 16, "page_size": 1}
TEXT_ALONE = ("GotOcr2ForConditionalGeneration",)  # whose processor writes 256 rows for an image, as for one of 1,024 pixels
FURTHER: dict[str, dict[str, Any]] = {
    "Idefics3ForConditionalGeneration": {"tp": 2, **CHUNKS},
    "LightOnOcrForConditionalGeneration": {"speculative_algorithm": "ngram", "speculative_adaptive": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in FALLBACK_FAMILIES if name not in TEXT_ALONE])
def test_images(architecture: str, tmp_path: Path) -> None:
    """All prompts at once in chunks, and again with what the first pass cached."""
    checkpoint = Checkpoint(make_media_checkpoint(tmp_path, architecture), NUM_TOKENS)
    prompts = make_prompts(architecture)
    try:
        with checkpoint.open_engine(**CHUNKS) as engine:
            passes = [run(engine, prompts, greedy(NUM_TOKENS)) for _ in range(2)]
            engine.control("check_integrity")
            for outputs in passes:
                checkpoint.expected.check(engine, prompts, outputs)
            assert sum(output.cached_tokens for output in passes[1]) > 0
        if architecture in FURTHER:
            with checkpoint.open_engine(**FURTHER[architecture]) as engine:
                checkpoint.expected.check(engine, prompts, run(engine, prompts, greedy(NUM_TOKENS)))
    finally:
        checkpoint.close()
