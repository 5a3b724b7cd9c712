"""Examples of the documents, copied from their text and run as a reader would run them. Only
addresses and the paths of models are replaced."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.entrypoints.fork_server import run_forked
from tests.entrypoints.http.openai.test_embeddings import folder_of_minilm
from tests.entrypoints.http.openai.test_transcriptions import as_wave, noise
from tests.entrypoints.serving import RunningServer
from tests.examples.conftest import ROOT
from tests.tiny_whisper import make_whisper

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:30000"
BODY = {"model": "frame-tiny", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 8}


class Example(NamedTuple):
    """The block of a page that has the text `has`; its output has the text `says`."""

    page: str
    has: str
    says: str


CLIENTS = [
    Example("README.md", "Reverse this list", "blue"),
    Example("docs/quickstart.md", "curl http://127.0.0.1:30000/v1/completions", "self"),
    Example("docs/quickstart.md", "client.chat.completions.create", "42"),
    Example("docs/http_api.md", "/v1/chat/completions", "[DONE]"),
    Example("docs/http_api.md", "/generate", "self"),
    Example("docs/dialects.md", "/v1/responses", "response.completed"),
    Example("docs/dialects.md", "client.conversations", ""),
    Example("docs/dialects.md", "/v1/messages", "message_stop"),
    Example("docs/dialects.md", "/api/chat", '"done":true'),
    Example("docs/dialects.md", "client.batches", ""),
]
ENGINES = [
    Example("README.md", "from frame import Engine", "self"),
    Example("docs/quickstart.md", "from frame import Engine", "self"),
    Example("docs/python.md", "from frame import Client, Engine", "self"),
    Example("docs/lang.md", "with Engine(model", "fire"),
]


def find_block(example: Example) -> tuple[str, str]:
    """(language, text) of an example."""
    blocks = [(language, text) for language, text in FENCE.findall((ROOT / example.page).read_text()) if example.has in text]
    assert len(blocks) == 1, f"{example.page} has {len(blocks)} examples with {example.has!r}"
    return blocks[0]


def run(language: str, text: str, folder: Path) -> str:
    if language == "python":
        done = run_forked([sys.executable, "-c", text], imports=("openai",), with_frame=False, cwd=folder)
    else:
        done = subprocess.run(["sh", "-euc", text], capture_output=True, text=True, timeout=500, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(Path("frame-tiny"), "--batch-folder", str(tmp_path_factory.mktemp("batches")), fake=False) as running:
        yield running


@pytest.mark.parametrize("example", CLIENTS, ids=lambda each: f"{each.page} {each.has}")
def test_clients(server: RunningServer, example: Example, tmp_path: Path) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    language, text = find_block(example)
    if language == "sh" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    assert ADDRESS in text
    assert example.says in run(language, text.replace(ADDRESS, server.url), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("example", ENGINES, ids=lambda each: f"{each.page} {each.has}")
def test_engines(example: Example, tmp_path: Path) -> None:
    assert example.says in run(*find_block(example), tmp_path)


@pytest.mark.slow
def test_embeddings(tmp_path: Path) -> None:
    model = "./all-MiniLM-L6-v2"
    _, text = find_block(Example("docs/embeddings.md", "curl", ""))
    serve, *curl = text.splitlines()
    assert serve == f"frame serve --model {model}"
    with RunningServer(folder_of_minilm(), fake=False) as running:
        reply = json.loads(run("sh", "\n".join(curl).replace(ADDRESS, running.url), tmp_path))
    assert [len(each["embedding"]) for each in reply["data"]] == [384, 384]
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(folder_of_minilm())
    _, text = find_block(Example("docs/embeddings.md", "engine.embed", ""))
    said = run("python", text + "print(vectors.shape, near[0] > near[1])", tmp_path)
    assert said.strip() == "(2, 384) True"


@pytest.mark.slow
def test_speech(tmp_path: Path) -> None:
    _, data = as_wave(noise(0.9))
    (tmp_path / "talk.wav").write_bytes(data)
    _, serve = find_block(Example("docs/speech.md", "frame serve", ""))
    model = serve.rpartition("./")[2].strip()
    with RunningServer(make_whisper(tmp_path / model), "--device", "cpu", "--dtype", "float32", fake=False) as running:
        language, text = find_block(Example("docs/speech.md", "client.audio", ""))
        assert run(language, text.replace(ADDRESS, running.url), tmp_path).strip()
