"""Media of offline prompts, in all forms in which a program gives them. The service that prepares
them and the engine are real."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.engine import Engine
from frame.entrypoints.offline.media import read_part, read_prompt
from frame.entrypoints.offline.prompts import has_media
from frame.lang import assistant, function, gen, image, select, user
from tests.models.media_checkpoints import make_media_checkpoint

TWO = SamplingParams(max_tokens=2, ignore_eos=True)
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


def pixels() -> np.ndarray:
    return np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_forms_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"content")
    for value in (tmp_path / "a.png", str(tmp_path / "a.png"), b"content"):
        assert read_part("image", value, "image").source == b"content"
    assert read_part("image", "https://example.com/a.png", "image").source == "https://example.com/a.png"
    for value in (pixels(), Image.fromarray(pixels())):
        source = read_part("image", value, "image").source
        assert isinstance(source, bytes)
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(source))), pixels())


def test_forms_of_audio() -> None:
    samples = np.linspace(-1.0, 1.0, 101, dtype=np.float32)
    for value, rate in ((samples, 16_000), ((samples, 8_000), 8_000)):
        source = read_part("audio", value, "audio").source
        assert isinstance(source, bytes)
        with wave.open(io.BytesIO(source)) as file:
            assert (file.getframerate(), file.getnchannels()) == (rate, 1)
            read = np.frombuffer(file.readframes(101), "<i2") / 32767.0
        np.testing.assert_allclose(read, samples, atol=1 / 32767)


def test_prompts_with_media() -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}],
        },
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]},
    ]
    assert has_media(messages)
    assert has_media([messages])
    assert not has_media([{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}])
    assert not has_media([[1, 2], "text"])
    template, parts = read_prompt(messages)
    assert [message["content"] for message in template] == [[{"type": "text", "text": "a"}, {"type": "image"}], [{"type": "audio"}]]  # type: ignore[index]
    assert [(part.modality, part.param, part.options) for part in parts] == [
        ("image", "messages[0].content[1].image_url", {"detail": "low"}), ("audio", "messages[1].content[0].input_audio", {}),
    ]  # fmt: skip
    assert has_media({"prompt": "x", "image": b""})
    _, parts = read_prompt({"prompt": "x", "audio": [b"1", b"2"], "image": b"3"})
    assert [part.source for part in parts] == [b"3", b"1", b"2"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ({"prompt": "x", "picture": b""}, "prompt"),
        ({"prompt": "x", "image": 3}, "image[0]"),
        ({"prompt": "x", "image": "/nowhere/a.png"}, "image[0]"),
        ({"prompt": "x", "image": np.zeros((2, 2, 7), np.float64)}, "image[0]"),
        ({"prompt": "x", "audio": np.zeros((2, 2), np.float32)}, "audio[0]"),
        ({"prompt": "x", "video": np.zeros((2, 2, 2, 3), np.uint8)}, "video[0]"),
        ([{"role": "user", "content": [{"type": "smell", "smell": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "user"}], "messages[0].content"),
    ],
)
def test_wrong_forms_are_named(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_prompt(prompt)
    assert caught.value.param == param


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_media_checkpoint(tmp_path_factory.mktemp("checkpoint") / "vision", "Qwen2_5_VLForConditionalGeneration")
    with Engine(str(folder), device="cpu", dtype="float32", max_total_tokens=4096, max_model_len=512) as engine:
        yield engine


@pytest.fixture
def rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of the media of each sequence that was started."""
    started: list[list[int]] = []
    start = engine._start

    def record(job: Any) -> None:
        started.extend([item.num_rows for item in sequence.media] for sequence in job.sequences)
        start(job)

    monkeypatch.setattr(engine, "_start", record)
    return started


def picture(height: int, width: int) -> np.ndarray:
    """Of as many rows as squares of 28 pixels."""
    return np.random.default_rng(height + width).integers(0, 255, (28 * height, 28 * width, 3), np.uint8)


def encode_png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def chat(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, *content]}]


def count_held(engine: Engine) -> int:
    service, loop = engine._media._service, engine._media._loop
    assert service is not None
    assert loop is not None
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # releases before it have run
    return len(service._held)


@pytest.mark.slow
def test_an_engine_runs_prompts_with_media(engine: Engine, rows: list[list[int]], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode_png(picture(2, 3)))
    prompts = [
        chat({"type": "image", "image": picture(2, 2)}, {"type": "image", "image": str(tmp_path / "a.png")}),
        "text alone",
        {"prompt": f"{PLACEHOLDER} and {PLACEHOLDER}", "image": [Image.fromarray(picture(1, 4)), encode_png(picture(3, 3))]},
    ]
    outputs = engine.generate(prompts, TWO)  # type: ignore[arg-type]
    assert [len(output.token_ids) for output in outputs] == [2, 2, 2]
    assert rows == [[4, 6], [], [4, 9]]
    params = SamplingParams(max_tokens=2, n=2, ignore_eos=True)
    assert engine.generate(chat({"type": "image", "image": picture(2, 3)}), params).prompt_tokens > 6
    assert rows[3:] == [[6], [6]]
    output = asyncio.run(engine.agenerate({"prompt": PLACEHOLDER, "image": picture(1, 1)}, TWO))
    assert output.finish_reason == "length"
    url = f"data:image/png;base64,{base64.b64encode(encode_png(picture(2, 5))).decode()}"
    for delta in engine.stream(chat({"type": "image_url", "image_url": url}), TWO):
        assert delta.output.prompt_tokens > 10
    assert count_held(engine) == 0


@pytest.mark.slow
def test_an_engine_refuses_and_gives_back(engine: Engine) -> None:
    good = chat({"type": "image", "image": picture(2, 2)})
    for wrong, param in (
        ({"prompt": "no place", "image": picture(2, 2)}, "messages"),
        (chat({"type": "image", "image": b"BAD"}), "messages[0].content[1].image"),
        (chat(*[{"type": "image", "image": picture(8, 8)}] * 9), "prompt"),
        ({"prompt": "x"}, "prompt"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            engine.generate([good, wrong], TWO)  # type: ignore[list-item]
        assert caught.value.param == param
    assert count_held(engine) == 0


def test_programs_show_images(engine: Engine, rows: list[list[int]]) -> None:
    @function
    def look(s: Any) -> None:
        s += user("what is " + image(encode_png(picture(2, 4))))
        s += assistant(gen("what", max_tokens=2))
        s += user("and " + image(f"data:image/png;base64,{base64.b64encode(encode_png(picture(3, 4))).decode()}"))
        s += assistant(select("which", ["a", "b"], method="constrained"))

    assert look.run(backend=engine)["which"] in ("a", "b")
    assert rows == [[8], [8, 12]]
    assert image(b"abc").url == f"data:image/png;base64,{base64.b64encode(b'abc').decode()}"
