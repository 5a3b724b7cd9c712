"""Programs over the real backends: the documented examples, equal results, scoring, prefix reuse,
and what a failure leaves."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import frame
from frame import Client, Engine
from frame.checkpoint.model_config import find_model
from frame.lang import OpenAI, ProgramError, UnsupportedError, assistant, function, gen, select, system, user
from tests.entrypoints.serving import RunningServer, wait_until

PAGE = Path(frame.__file__).parent.parent / "docs" / "lang.md"
EXAMPLES = re.findall(r"^### (.+?)\n\n```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
KEYS = {"model": "frame-tiny", "dtype": "float32", "threads": 1, "max_model_len": 2048, "max_total_tokens": 32768}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(**KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def backends(engine: Engine) -> Iterator[dict[str, Any]]:
    flags = ("--dtype", "float32", "--threads", "1", "--max-model-len", "2048", "--max-total-tokens", "32768")
    with RunningServer(Path("frame-tiny"), *flags, fake=False) as server, Client(server.url) as client:
        yield {"engine": engine, "client": client, "openai": OpenAI(f"{server.url}/v1", "frame-tiny", extensions=True)}


def run_example(source: str, file: Path, backend: Any) -> None:
    file.write_text(source)  # programs are read for what they ask of a backend
    exec(compile(source, str(file), "exec"), {"backend": backend, "__name__": "example"})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in EXAMPLES])
def test_examples_of_the_page(name: str, backends: dict[str, Any], tmp_path: Path) -> None:
    source = dict(EXAMPLES)[name]
    for backend in backends.values():
        run_example(source, tmp_path / "example.py", backend)


def test_the_page_has_ten_examples() -> None:
    assert len(EXAMPLES) >= 10


@function
def tour(s: Any, topic: str) -> None:
    s += system("You are brief.")
    s += user(f"About {topic}?")
    s += assistant("It is " + select("kind", ["an animal", "a tool"], method="constrained") + ". " + gen("why", max_tokens=12))
    branches = s.fork(2)
    for number, branch in enumerate(branches):
        branch += user(f"Point {number}.")
        branch += assistant(gen("point", regex="[a-z ]{4,12}"))
    branches.join()
    s += user(" and ".join(s["point"]))
    s += assistant(gen("end", max_tokens=8, stop=["."]))


@pytest.mark.slow
def test_backends_agree(backends: dict[str, Any]) -> None:
    found = {}
    for name, backend in backends.items():
        state = tour.run(topic="a cat", backend=backend, sampling={"temperature": 0.0})
        found[name] = state.values, state.messages
    assert found["engine"] == found["client"] == found["openai"]
    assert found["engine"][0]["kind"] in ("an animal", "a tool")


def test_forms_agree(engine: Engine) -> None:
    keywords: dict[str, Any] = {"topic": "rain", "backend": engine, "seed": 5}
    first = tour.run(**keywords).values
    assert tour.run(**keywords).values == first != tour.run(**{**keywords, "seed": 6}).values
    assert asyncio.run(tour.arun(**keywords)).values == first
    pieces: dict[tuple[str | None, str], str] = {}
    for name, text, branch in tour.stream(**keywords):
        pieces[name, branch] = pieces.get((name, branch), "") + text
    assert pieces == {
        ("kind", ""): first["kind"], ("why", ""): first["why"], ("end", ""): first["end"],
        ("point", "0"): first["point"][0], ("point", "1"): first["point"][1],
    }  # fmt: skip
    batch = tour.run_batch([{"topic": "rain"}, {"topic": "snow"}], backend=engine, seed=5)
    assert batch[0].values == first and batch[1].values == tour.run(topic="snow", backend=engine, seed=5).values


@pytest.mark.parametrize("normalization", ["token", "sum"])
@pytest.mark.parametrize("remote", [False, True])
def test_select_equals_scoring_by_transformers(backends: dict[str, Any], normalization: Any, remote: bool) -> None:
    choices = ["a cat", "the blue elephant in the garden", "dog", "return x"]
    backend = backends["client" if remote else "engine"]
    model = AutoModelForCausalLM.from_pretrained(find_model("frame-tiny"), dtype=torch.float32)

    @function
    def choose(s: Any, text: str) -> None:
        s += text
        s += select("choice", choices, normalization=normalization)

    for text in ("def add(a, b):\n    ", "Once upon a time there was ", "I like "):
        state = choose.run(text=text, backend=backend)
        prefix = backends["engine"].tokenizer.encode(text)
        expected = []
        for choice in choices:
            ids = backends["engine"].tokenizer.encode(choice, False)
            with torch.no_grad():
                logits = model(torch.tensor([prefix + ids])).logits[0].log_softmax(-1)
            values = [float(logits[len(prefix) + place - 1, token]) for place, token in enumerate(ids)]
            expected.append(sum(values) / (len(values) if normalization == "token" else 1))
        (entry,) = [entry for entry in state.runtime.entries if entry.kind == "select"]
        assert entry.generated is not None and entry.generated.scores == pytest.approx(expected, abs=1e-3)
        assert state["choice"] == choices[expected.index(max(expected))]


@function
def fan(s: Any, prefix: str, count: int) -> None:
    s += prefix
    for number, branch in enumerate(s.fork(count)):
        branch += f" {number}:"
        branch += gen("text", max_tokens=2, ignore_eos=True)


def test_a_forks_prefix_is_computed_once(engine: Engine) -> None:
    text = "".join(f"line {number} of a long text\n" for number in range(140))
    length = len(engine.tokenizer.encode(text))
    assert length > 1000
    engine.flush_cache()
    usage = fan.run(prefix=text, count=4, backend=engine).usage
    assert usage["cached_tokens"] >= 3 * (length - 64) and usage["prompt_tokens"] > 4 * length


@function
def endless(s: Any, ready: Any, fail: bool) -> None:
    s += user("Once")
    branches = s.fork(3)
    for branch in branches:
        branch += assistant(gen("text", max_tokens=1500, ignore_eos=True))
    ready()
    if fail:
        raise KeyError("in the middle")


def assert_nothing_runs(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    while (load := engine.control("server_info"))["running"] or load["waiting"] or load["used_pages"]:
        assert time.monotonic() < deadline, load
        time.sleep(0.05)
    assert engine.control("check_integrity") is not None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("frame.lang")]


@pytest.mark.parametrize("kind", ["fails", "times out", "is cancelled", "is left"])
def test_an_end_in_the_middle_leaves_nothing(backends: dict[str, Any], kind: str) -> None:
    idle = backends["client"]
    idle.control("server_info")  # its connection is open from here on
    for backend in (backends["engine"], Client(idle._settings["base_url"]), backends["openai"]):
        gc.collect()
        opened = len(psutil.Process().net_connections("tcp"))
        if kind == "fails":
            with pytest.raises(KeyError, match="in the middle"):
                endless.run(ready=lambda: time.sleep(0.3), fail=True, backend=backend)
        elif kind == "times out":
            with pytest.raises(ProgramError, match=r"endless took longer than 0\.5 s"):
                endless.run(ready=lambda: None, fail=False, backend=backend, timeout=0.5)
        elif kind == "is left":
            for _ in endless.stream(ready=lambda: None, fail=False, backend=backend):
                break
        else:

            async def cancelled(backend: Any = backend) -> int:
                running = asyncio.ensure_future(endless.arun(ready=lambda: None, fail=False, backend=backend))
                await asyncio.sleep(0.4)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                return len(asyncio.all_tasks()) - 1

            assert asyncio.run(cancelled()) == 0
        if backend is backends["engine"]:
            assert_nothing_runs(backend)
        else:
            assert_server_is_idle(idle)
            if isinstance(backend, Client):
                backend.close()  # what its blocking calls keep alive is its own
            wait_until(lambda opened=opened: len(psutil.Process().net_connections("tcp")) <= opened)


def assert_server_is_idle(client: Client) -> None:
    deadline = time.monotonic() + 20
    while client.info["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_features_are_refused_before_anything_runs() -> None:
    calls: list[str] = []

    @function
    def needs(s: Any) -> None:
        calls.append("ran")
        s += user("x")
        s += assistant(gen("x", regex="[a-z]"))

    plain = OpenAI("http://127.0.0.1:9/v1", "m")
    with pytest.raises(UnsupportedError, match=r"needs uses regex, which backend OpenAI \(chat\) does not support"):
        needs.run(backend=plain)
    with pytest.raises(UnsupportedError, match="needs uses role, which backend"):
        needs.run(backend=OpenAI("http://127.0.0.1:9/v1", "m", api="completions", extensions=True))
    assert calls == []


def test_no_sampling_parameter_is_dropped() -> None:
    @function
    def ask(s: Any) -> None:
        s += user("x")
        s += assistant(gen("x", top_k=5, json_object=True))

    with pytest.raises(ProgramError, match=r"ask, line \d+: backend OpenAI \(chat\) does not support the sampling .*json_object, top_k"):
        ask.run(backend=OpenAI("http://127.0.0.1:9/v1", "m"))


def test_a_server_that_is_not_there(backends: dict[str, Any]) -> None:
    @function
    def ask(s: Any) -> None:
        s += user("x")
        s += assistant(gen("x"))

    with pytest.raises(ProgramError, match=r"ask, line \d+: http://127.0.0.1:9/v1 did not answer"):
        ask.run(backend=OpenAI("http://127.0.0.1:9/v1", "m"))
