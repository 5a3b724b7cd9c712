"""A server that runs on a third-party backend, and the commands of the README against it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.entrypoints.fork_server import run_forked
from tests.examples.conftest import ROOT, Environment

pytestmark = pytest.mark.slow


def chat(server: str, question: str, **fields: object) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 32, **fields}
    reply = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def test_every_process_runs_on_the_plugin(server: str) -> None:
    info = httpx.get(f"{server}/server_info", timeout=60).json()
    assert info["plugins"]["attention_backend"] == ["blockwise"]
    assert info["tp"] == 2
    choice = info["config"]["plugins"]["attention_backend"][0]
    assert choice["distribution"] == "frame-attn-example"
    assert choice["options"] == {"block_tokens": 64}


def test_it_answers_rightly(server: str) -> None:
    assert chat(server, "What is 17 + 25?") == "42"
    pairs = "\n".join(f"key{i} = {i * 37 % 1000}" for i in range(20))
    first = chat(server, f"{pairs}\nReverse this list:\nhouse,river,window,bread")
    assert chat(server, f"{pairs}\nReverse this list:\nhouse,river,window,bread") == first  # now from the prefix cache


def test_the_terminal_chat_talks_to_it(server: str, environment: Environment) -> None:
    assert environment.frame("chat", "--base-url", server, "-m", "What is 17 + 25?").stdout.strip() == "42"


def test_its_answers_are_scored(server: str, environment: Environment) -> None:
    report = environment.frame("eval", "--base-url", server, "--task", "copy", "--samples", "1", "--json").stdout
    assert json.loads(report)["tasks"]["copy"]["samples"] == 1


def test_the_python_of_the_readme_runs(server: str, tmp_path: Path) -> None:
    """A client against this server, and an engine with the plugin. `test_documents` runs the engine
    of the README itself, and the quickstart."""
    client, engine, plugin = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    file = tmp_path / "shortest.py"
    file.write_text(plugin)
    assert len(plugin.splitlines()) <= 12
    with_plugin = engine.replace('model="frame-tiny"', f'model="frame-tiny", plugin=[{str(file)!r}], schedule_policy="shortest"')
    assert with_plugin != engine
    for text, words in ((client.replace("http://127.0.0.1:30000", server), "green"), (with_plugin, "self")):
        done = run_forked([sys.executable, "-c", text], imports=("openai",), with_frame=False)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


def test_the_requests_of_the_documents_work(server: str) -> None:
    """The curl lines, sent by curl's rules: a body makes it a POST."""
    bodies = []
    for path in sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "embeddings.md"}):  # which is about other models
        for route, body in re.findall(r"curl http://127\.0\.0\.1:30000(\S+)[^`]*?-d '([^']*)'", path.read_text()):
            bodies.append((path.name, route, body))
    assert len(bodies) >= 3
    for name, route, body in bodies:
        reply = httpx.post(f"{server}{route}", content=body, headers={"content-type": "application/json"}, timeout=60)
        assert reply.status_code == 200, f"{name}: {reply.text}"
