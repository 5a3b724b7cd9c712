"""Runs engines over prompts with media. The only module here that knows frame's Python API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from frame import Engine, SamplingParams
from frame.core.interfaces.media import MediaItem
from frame.entrypoints.offline.media import OfflineMedia
from tests.media.reference.prompts import Prompt
from tests.media.reference.reference import Expected, Reference

KEYS: dict[str, Any] = {
    "dtype": "float32", "threads": 1, "max_model_len": 1024, "max_total_tokens": 8192, "max_running_requests": 16, "media_processes": 1,
}  # fmt: skip
Key = int | tuple[str, bytes]  # a token, or a placeholder


class SharedMedia(OfflineMedia):
    """The media of several engines of one checkpoint, whose processes start once."""

    def close(self) -> None:
        """An engine ends, and others may follow; see `end`."""

    def end(self) -> None:
        super().close()


class Checkpoint:
    """A checkpoint, its media, and what transformers generates."""

    def __init__(self, folder: Path, num_tokens: int, min_chunk: int = 0) -> None:
        """min_chunk: of a model that reads an item in one step, whatever a test asks for."""
        self.folder, self._min_chunk = folder, min_chunk
        self.reference = Reference(folder)
        self.expected = Expectations(self.reference, num_tokens)
        self._media: SharedMedia | None = None

    def open_engine(self, **keys: Any) -> Engine:
        if keys.get("chunked_prefill_size", self._min_chunk) < self._min_chunk:
            keys["chunked_prefill_size"] = self._min_chunk
        engine = Engine(str(self.folder), **KEYS | keys)
        if self._media is None:
            self._media = SharedMedia(engine._resolved)
        engine._media = self._media
        return engine

    def close(self) -> None:
        if self._media is not None:
            self._media.end()


def greedy(num_tokens: int, **keys: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **keys)


def run(engine: Engine, prompts: Sequence[Prompt], params: Any, **keys: Any) -> list[Any]:
    """One call with all prompts."""
    outputs: list[Any] = engine.generate([prompt.given for prompt in prompts], params, **keys)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


@contextmanager
def prepare(engine: Engine, prompt: Prompt) -> Iterator[tuple[list[int], list[MediaItem]]]:
    """The token ids of a prompt and its items, whose files are there in the context."""
    with ExitStack() as held:
        yield engine._media.encode(prompt.given, engine.tokenizer, held) if _has_files(prompt) else (_encode(engine, prompt), [])


def _has_files(prompt: Prompt) -> bool:
    if isinstance(prompt.given, dict):
        return True
    return any(part["type"] != "text" for message in prompt.given if isinstance(message["content"], list) for part in message["content"])


def _encode(engine: Engine, prompt: Prompt) -> list[int]:
    return list(engine.tokenizer.encode_chat(prompt.given))


def list_keys(engine: Engine, prompt: Prompt) -> list[Key]:
    """What prompts that share cached tokens have in common: tokens, and the item and row of
    placeholders."""
    with prepare(engine, prompt) as (ids, items):
        keys: list[Key] = list(ids)
        for item in items:
            for each in item.runs:
                keys[each.start : each.start + each.count] = [(item.modality, item.digest)] * each.count
    return keys


def count_common(first: Sequence[Key], second: Sequence[Key]) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


class Expectations:
    """What transformers generates for each prompt, computed once."""

    def __init__(self, reference: Reference, num_tokens: int) -> None:
        self._reference, self._num_tokens = reference, num_tokens
        self._known: dict[str, Expected] = {}

    def find(self, engine: Engine, prompt: Prompt) -> Expected:
        if prompt.name not in self._known:
            with prepare(engine, prompt) as (ids, items):
                self._known[prompt.name] = self._reference.generate(prompt, ids, items, self._num_tokens)
        return self._known[prompt.name]

    def check(self, engine: Engine, prompts: Sequence[Prompt], outputs: Sequence[Any]) -> None:
        for prompt, output in zip(prompts, outputs, strict=True):
            for each in output.outputs or [output]:
                self.find(engine, prompt).check(each.token_ids, prompt.name)
