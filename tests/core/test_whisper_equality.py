"""Float32 greedy tokens of Whisper equal those of transformers: whole prompts, chunks, mixed steps,
hits, preemptions, page sizes, overlap and two ranks. Every request has its own audio."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import greedy, make_loop, on_two_ranks, prepared_for
from tests.speculation.test_draft_graphs import CapturableAttention
from tests.tiny_whisper import CONTEXT, FIRST, MELS, POSITIONS, load_whisper, make_items, make_whisper

GREEDY = greedy(64)


@dataclass(frozen=True)
class AudioCase:
    folder: str
    prompts: list[list[int]]
    inputs: list[np.ndarray]  # float32 [mel bins, frames]
    reference: Any

    def run(self, loop: LocalLoop, params: Any = GREEDY) -> None:
        outputs = loop.generate(self.prompts, params, make_items(Path(self.folder), self.inputs))
        for prompt, given, output in zip(self.prompts, self.inputs, outputs, strict=True):
            with torch.no_grad():
                ids = torch.tensor([prompt + output])
                logits = self.reference(input_features=torch.from_numpy(given)[None], decoder_input_ids=ids).logits[0]
            assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        loop.scheduler.check_integrity()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AudioCase:
    folder: Path = make_whisper(tmp_path_factory.mktemp("whisper"))
    numbers, noise = random.Random(7), np.random.default_rng(7)
    prompts = [[FIRST, *(numbers.randrange(6, 384) for _ in range(length))] for length in (3, 40, 3, 1, 17, 25)]
    prompts[2] = prompts[0]  # equal tokens, other audio
    inputs = [noise.standard_normal((MELS, 2 * POSITIONS), np.float32) for _ in prompts]
    return AudioCase(str(folder), prompts, inputs, load_whisper(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 512)])
def test_tokens_equal_those_of_transformers(case: AudioCase, page_size: int, chunk: int) -> None:
    loop = make_loop(case.folder, 4096, "torch_native", page_size=page_size, chunk=chunk)
    case.run(loop)
    assert loop.stats["mixed"] > 0 or chunk == 512
    assert loop.stats["cached"] == 0
    case.run(loop)  # the same audio: prefixes hit
    assert loop.stats["cached"] > 40


@pytest.mark.slow
def test_another_backend(case: AudioCase) -> None:
    case.run(make_loop(case.folder, 4096, "flex_attention", chunk=30), greedy(3))


def test_a_preempted_request_is_encoded_again(case: AudioCase) -> None:
    loop = make_loop(case.folder, 272, page_size=4, chunk=16)
    case.run(loop)
    assert loop.scheduler.get_load()["preempted"] > 0


def test_requests_wait_for_blocks(case: AudioCase) -> None:
    loop = make_loop(case.folder, CONTEXT, overlap=False)
    assert loop.runner.capacity.pools[-1].num_pages == 3  # the reserved one, and half a context each
    case.run(loop, greedy(4))
    assert [group["used_pages"] for group in loop.scheduler.get_load()["groups"]] == [0]


def test_two_ranks(case: AudioCase) -> None:
    on_two_ranks(case, case.run, tokens=4096)  # type: ignore[arg-type]


def test_captured_steps(case: AudioCase) -> None:
    """Decodes read their blocks by the slots of the replay; prompts of few tokens are decodes too,
    unless the encoder runs in their step."""
    config = {
        "model": {"path": case.folder, "dtype": "float32"},
        "cache": {"max_total_tokens": 4096, "page_size": 16},
        "scheduler": {"max_running_requests": 4, "chunked_prefill_size": 24},
        "attention": {"backend": "capturable"},
        "execution": {"device": "cpu", "threads": 1},
    }
    prepared = prepare(FrameConfig.model_validate(config), classes=[CapturableAttention])
    runner = build_rank(prepared.resolved, prepared.registry)
    limits = runner.context.limits
    assert limits.max_decodes == limits.max_tokens_per_step  # cross-attention computes each token as a decode
    runner.capture_decode_graphs(32)
    loop, sizes = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner), set()
    replay = runner.decode_graphs.replay

    def watch(tokens: Any, *rest: Any, **more: Any) -> Any:
        sizes.add((len(tokens.slots), tokens.num_sampling))
        return replay(tokens, *rest, **more)

    runner.decode_graphs.replay = watch
    case.run(loop, greedy(20))
    assert {(4, 4), (2, 2)} <= sizes
    assert any(sampling < rows for rows, sampling in sizes)


def test_inputs_of_the_wrong_kind_are_refused(case: AudioCase) -> None:
    loop = make_loop(case.folder, 4096)
    with pytest.raises(RuntimeError, match="the request has none; use the route audio/transcriptions"):
        loop.generate([[FIRST]], GREEDY)
    items = make_items(Path(case.folder), case.inputs[:2])
    with pytest.raises(RuntimeError, match="the model reads one audio input"):
        loop.generate([[FIRST]], GREEDY, [items[0] + items[1]])
    with pytest.raises(RuntimeError, match="this server reads text alone"):
        make_loop("frame-tiny", 4096).generate([[5]], GREEDY, items[:1])
    with pytest.raises(ConfigurationError, match="encoder-decoder models verify no drafts"):
        prepared_for(case.folder, 4096, speculative={"algorithm": "ngram"})
