"""Servers whose model says what a script says, and the coding agents that are driven against them.

`make agents` installs the programs; without one its test is skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import frame
from tests.clients.conftest import TEMPLATE
from tests.entrypoints import base_only
from tests.entrypoints.serving import RunningServer

ROOT = Path(__file__).parents[3]
INSTALLED = ROOT / "build/agents"
# The programs themselves, in the packages of their platform
PROGRAMS = {
    "claude": "node_modules/@anthropic-ai/claude-code-*/claude",
    "codex": "node_modules/@openai/codex-*/vendor/*/bin/codex",
    "opencode": "node_modules/opencode-*/bin/opencode",
    "aider": "aider/bin/aider",
}
CONFIG = """
model: {{dtype: float32, served_name: {name}}}
text: {{reasoning_parser: think-tags, tool_call_parser: hermes, chat_template: {folder}/template.jinja}}
sampling: {{processors: [{processors}]}}
plugins:
  paths: [{plugin}]
  options: {{logits_processor/scripted: {{script: {folder}/script.json}}, reasoning_parser/think-tags: {{opens_itself: false}}}}
"""

# Shows what the request says of reasoning, by the two names of the switch, and of verbosity
SWITCHES = "{% if enable_thinking is defined %}[{{ enable_thinking }}{{ thinking }}]{% endif %}{{ verbosity }}"

Reply = dict[str, Any]  # see `scripted/processor.py`


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """The path of a program; its test is skipped without it."""

    def find(name: str) -> str:
        found = next(iter(sorted(INSTALLED.glob(PROGRAMS[name]))), None)
        if found is None:
            pytest.skip(f"{name} is not installed: make agents")
        return str(found)

    return find


@pytest.fixture(scope="session")
def agent_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads a long prompt quickly: one layer that attends to few tokens."""
    from frame.testing.checkpoints import make_checkpoint

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    more = {"vocab_size": 2048, "intermediate_size": 32, "max_position_embeddings": 262144, "sliding_window": 64}
    folder = make_checkpoint("MistralForCausalLM", tmp_path_factory.mktemp("agents") / "agent-model", **sizes, **more)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(frame.__file__).parent / "models/frame_tiny" / name, folder)
    return folder


def serve(
    checkpoint: Path, folder: Path, replies: list[Reply], *flags: str, name: str = "agent-model", processors: str = "builtin, scripted"
) -> RunningServer:
    """A server of the base installation whose model says `replies`."""
    (folder / "template.jinja").write_text(SWITCHES + TEMPLATE)
    (folder / "script.json").write_text(json.dumps({"tokenizer": str(checkpoint / "tokenizer.json"), "replies": replies}))
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder, name=name, processors=processors, plugin=Path(__file__).parent / "scripted"))
    return RunningServer(checkpoint, "--config", str(config), *flags, fake=False, env=base_only.environment())


MARKS = {"<think>": 2042, "</think>": 2043, "<|fim_prefix|>": 2044, "<|fim_suffix|>": 2045, "<|fim_middle|>": 2046}


@pytest.fixture(scope="session")
def marked_server(agent_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Like `scripted_server`, with the tags of reasoning and the tokens of code models in the
    vocabulary, and the in-tree logits processors after the script."""
    folder = tmp_path_factory.mktemp("marks")
    checkpoint = folder / "agent-model"
    shutil.copytree(agent_checkpoint, checkpoint)
    rename_tokens(checkpoint / "tokenizer.json", MARKS)
    with serve(checkpoint, folder, [], processors="scripted, builtin") as running:
        yield running


def rename_tokens(path: Path, names: dict[str, int]) -> None:
    """Make tokens of the vocabulary added tokens with these texts."""
    data = json.loads(path.read_text())
    model, flags = data["model"], dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for text, token in names.items():
        old = next(name for name, i in model["vocab"].items() if i == token)
        del model["vocab"][old]
        model["vocab"][text] = token
        model["merges"] = [each for each in model["merges"] if "".join(each) != old and old not in each]
        data["added_tokens"].append({"id": token, "content": text, **flags})
    path.write_text(json.dumps(data))


@pytest.fixture(scope="session")
def scripted_server(agent_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose model says what the prompt asks for (`processor.SAY`), else done."""
    with serve(agent_checkpoint, tmp_path_factory.mktemp("script"), []) as running:
        yield running
