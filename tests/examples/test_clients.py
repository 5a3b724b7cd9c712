"""The scripts of examples/clients, as a user runs them, against servers of small models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.agents.conftest import agent_checkpoint, serve  # noqa: F401 - a fixture
from tests.entrypoints.fork_server import run_forked
from tests.entrypoints.http.openai.test_embeddings import folder_of_minilm
from tests.entrypoints.http.openai.test_transcriptions import as_wave, noise
from tests.entrypoints.serving import RunningServer
from tests.examples.conftest import ROOT
from tests.tiny_whisper import make_whisper

FOLDER = ROOT / "examples" / "clients"
NAMES = {"agent", "rag", "batch", "extract", "transcribe"}


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


REPLIES = [
    {"has": "How warm", "after": 0, "says": call("get_temperature", city="Oslo")},
    {"has": "How warm", "after": 1, "says": call("to_fahrenheit", celsius=4.0)},
    {"has": "How warm", "after": 2, "says": "It is 39.2 degrees."},
    {"has": "opens at nine", "says": "At nine."},
    {"has": "Two teapots", "says": json.dumps({"customer": "Ada", "item": "teapot", "count": 2, "is_urgent": True}, separators=(",", ":"))},
    {"has": "a prompt", "says": "an answer"},
]


@pytest.fixture(scope="module")
def chat(agent_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:  # noqa: F811
    folder = tmp_path_factory.mktemp("chat")
    with serve(agent_checkpoint, folder, REPLIES, "--batch-folder", str(folder / "batches")) as running:
        yield running


def run(name: str, *arguments: str | Path, fails: bool = False) -> str:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *map(str, arguments)]
    done = run_forked(command, imports=("openai",), with_frame=False)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout


def test_every_script_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == NAMES


@pytest.mark.slow
def test_agent(chat: RunningServer) -> None:
    said = run("agent", "--base-url", chat.url + "/v1", "--model", "agent-model", "How warm is it in Oslo, in Fahrenheit?")
    assert said.splitlines() == ['get_temperature({"city": "Oslo"}) = 4.0', 'to_fahrenheit({"celsius": 4.0}) = 39.2', "It is 39.2 degrees."]


@pytest.mark.slow
def test_extraction(chat: RunningServer) -> None:
    said = run("extract", "--base-url", chat.url + "/v1", "--model", "agent-model", "Two teapots for Ada, by Friday, please.")
    assert json.loads(said) == {"customer": "Ada", "item": "teapot", "count": 2, "is_urgent": True}


def test_batch(chat: RunningServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a prompt: one\na prompt: two\n")
    said = run("batch", prompts, "--base-url", chat.url + "/v1", "--model", "agent-model", "--interval", "0.1")
    assert [json.loads(line) for line in said.splitlines()] == [
        {"prompt": "a prompt: one", "answer": "an answer"},
        {"prompt": "a prompt: two", "answer": "an answer"},
    ]


@pytest.mark.slow
def test_retrieval(chat: RunningServer, tmp_path: Path) -> None:
    with RunningServer(folder_of_minilm(), fake=False) as vectors:
        notes = tmp_path / "notes.txt"
        notes.write_text("The library opens at nine.\n\nCats sleep most of the day.\n\nThe harbour is closed in winter.")
        urls = ("--embed-url", vectors.url, "--rerank-url", vectors.url, "--chat-url", chat.url)
        said = run("rag", notes, "--question", "When does the library open?", "--candidates", "2", "--kept", "1", *urls)
    assert said.splitlines() == ["from:", "- The library opens at nine.", "At nine."]


@pytest.mark.slow
def test_transcription(tmp_path: Path) -> None:
    name, data = as_wave(noise(0.9))
    (tmp_path / name).write_bytes(data)
    with RunningServer(make_whisper(tmp_path / "whisper"), "--device", "cpu", "--dtype", "float32", fake=False) as speech:
        options = ("--base-url", speech.url + "/v1", "--model", "whisper", "--language", "en")
        assert run("transcribe", tmp_path / name, *options)
        assert "-->" in run("transcribe", tmp_path / name, *options, "--format", "srt")
