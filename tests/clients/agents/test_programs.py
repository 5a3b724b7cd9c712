"""Coding agents as they come from npm and PyPI edit a file and run a command, with a model that
says what it should say. Only their base URL is ours, and they reach nothing but the server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents.conftest import Reply, serve

TASK = "Fix the typo in hello.py and run it."
DONE = "Fixed: it prints hello."
PATCH = """*** Begin Patch
*** Update File: hello.py
@@
-print("helo")
+print("hello")
*** End Patch
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_turn(*texts: str) -> list[Reply]:
    """One reply after each tool result."""
    return [{"after": count, "says": text} for count, text in enumerate(texts)]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "hello.py").write_text('print("helo")\n')
    return folder


def run(command: list[str], work: Path, **env: str) -> str:
    """The program's standard output. It has a home of its own, and no variable of ours."""
    home = work.parent / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", **env}
    done = subprocess.run(command, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_claude_code(agent_checkpoint: Path, work: Path, program: Callable[[str], str]) -> None:
    command = [program("claude"), "-p", TASK, "--allowedTools", "Read,Edit,Bash", "--output-format", "stream-json", "--verbose"]
    file = str(work / "hello.py")
    replies = in_turn(
        "I read it." + call("Read", file_path=file),
        call("Edit", file_path=file, old_string="helo", new_string="hello"),
        call("Bash", command="python3 hello.py", description="Run it"),
        DONE,
    )
    with serve(agent_checkpoint, work.parent, replies) as server:
        env = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "agent-model"}
        lines = run(command, work, **env, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1").splitlines()
    events = [json.loads(line) for line in lines]
    assert (work / "hello.py").read_text() == 'print("hello")\n'
    results = [part["content"] for event in events if event["type"] == "user" for part in event["message"]["content"]]
    assert results[-1] == "hello"
    assert (events[-1]["is_error"], events[-1]["result"]) == (False, DONE)


@pytest.mark.parametrize("model", ["agent-model", "gpt-5.5"])
def test_codex(agent_checkpoint: Path, work: Path, program: Callable[[str], str], model: str) -> None:
    """Codex knows gpt-5.5 and sends its tools: `apply_patch` with a Lark grammar, and a search."""
    command = [program("codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json", TASK]
    edit = call("apply_patch", input=PATCH) if model == "gpt-5.5" else call("exec_command", cmd="sed -i s/helo/hello/ hello.py")
    with serve(agent_checkpoint, work.parent, in_turn(edit, call("exec_command", cmd="python3 hello.py"), DONE), name=model) as server:
        home = work.parent / "codex"
        home.mkdir()
        provider = f'[model_providers.frame]\nname = "frame"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
        (home / "config.toml").write_text(f'model = "{model}"\nmodel_provider = "frame"\n{provider}')
        lines = run(command, work, CODEX_HOME=str(home)).splitlines()
    items = [event["item"] for event in map(json.loads, lines) if event["type"] == "item.completed"]
    assert (work / "hello.py").read_text() == 'print("hello")\n'
    commands = [item for item in items if item["type"] == "command_execution"]
    assert (commands[-1]["exit_code"], commands[-1]["aggregated_output"]) == (0, "hello\n")
    assert (items[-1]["type"], items[-1]["text"]) == ("agent_message", DONE)


def test_opencode(agent_checkpoint: Path, work: Path, program: Callable[[str], str]) -> None:
    file = str(work / "hello.py")
    replies = in_turn(
        call("read", filePath=file),
        call("edit", filePath=file, oldString="helo", newString="hello"),
        call("bash", command="python3 hello.py", description="Run it"),
        DONE,
    )
    with serve(agent_checkpoint, work.parent, replies) as server:
        options = {"baseURL": f"{server.url}/v1", "apiKey": "none"}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "frame", "options": options, "models": {"agent-model": {}}}
        config = work.parent / "opencode.json"
        config.write_text(
            json.dumps({"autoupdate": False, "share": "disabled", "model": "frame/agent-model", "provider": {"frame": provider}})
        )
        env = {"OPENCODE_CONFIG": str(config), "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
        output = run([program("opencode"), "run", "--title", "a title", TASK], work, **env)
    assert (work / "hello.py").read_text() == 'print("hello")\n'
    assert DONE in output


def test_aider(agent_checkpoint: Path, work: Path, program: Callable[[str], str]) -> None:
    """Aider asks for blocks to search and replace, and runs the test command itself."""
    block = '<<<<<<< SEARCH\nprint("helo")\n=======\nprint("hello")\n>>>>>>> REPLACE'
    says = f"I fix it.\n\nhello.py\n```python\n{block}\n```\n"
    flags = ["--yes-always", "--no-git", "--no-check-update", "--no-analytics", "--no-show-model-warnings", "--edit-format", "diff"]
    flags += ["--map-tokens", "0", "--no-detect-urls", "--auto-test", "--test-cmd", "python3 hello.py > said.txt"]
    with serve(agent_checkpoint, work.parent, [{"says": says}]) as server:
        env = {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        run([program("aider"), "--model", "openai/agent-model", *flags, "--message", TASK, "hello.py"], work, **env)
    assert (work / "hello.py").read_text() == 'print("hello")\n'
    assert (work / "said.txt").read_text() == "hello\n"
