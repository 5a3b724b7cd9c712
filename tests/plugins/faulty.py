"""In-tree plugins with one fault each, registered by a package `theirs` of version 2.1, and engines
with them."""

from __future__ import annotations

import json
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from frame.config.schema import FrameConfig
from frame.core.engine import Engine
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import AnyMessage, Control, Fatal, Finish, Generate, StepTokens
from frame.entrypoints.configuration import prepare as preparing
from frame.entrypoints.configuration.prepare import Prepared, prepare
from frame.entrypoints.processes.build_engine import build_engine
from frame.plugins.loader import load_registry

MODULE = "theirs_faulty"
OWNER = "(theirs 2.1)"
# one of ours of each kind
OUR_PLUGINS = {
    "platform": "cpu",
    "collective": "single",
    "launcher": "local",
    "model": "mixtral",
    "attention_backend": "torch_native",
    "weight_format": "none",
    "gemm_kernel": "plain",
    "moe_runner": "torch_native",
    "moe_dispatcher": "all_reduce",
    "weight_source": "safetensors",
    "scheduling_policy": "fcfs",
    "prefix_cache": "radix",
    "eviction_policy": "lru",
    "kv_allocator": "stack",
    "logits_processor": "logit-bias",
    "sampler": "torch",
    "grammar_backend": "llguidance",
    "reasoning_parser": "think-tags",
    "tool_call_parser": "hermes",
    "stat_logger": "log",
    "drafter": "ngram",
    "adapter": "lora",
}
SECTIONS = {
    "model": ("model", "implementation"),
    "attention_backend": ("attention", "backend"),
    "weight_format": ("model", "quantization"),
    "gemm_kernel": ("model", "gemm_kernel"),
    "moe_runner": ("moe", "runner"),
    "moe_dispatcher": ("moe", "dispatcher"),
    "scheduling_policy": ("scheduler", "policy"),
    "eviction_policy": ("cache", "eviction"),
    "logits_processor": ("sampling", "processors"),
}
BASES = {kind: OUR_PLUGINS[kind] for kind in SECTIONS}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
}


def boom(self: Any, *_: Any, **__: Any) -> Any:
    raise RuntimeError("boom")


def remedy(kind: str) -> str:
    key = ".".join(SECTIONS[kind])
    change = f"leave it out of {key}" if kind == "logits_processor" else f"name another plugin with {key}"
    return f"{change}, or report the fault to the authors of theirs"


class Faulty:
    """Registers one faulty plugin, selects it, and builds engines with it."""

    def __init__(self, folder: Path, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.module = module
        self.registry = load_registry(installed=False)
        monkeypatch.setattr(preparing, "load_configured", lambda *_: self.registry)

    def add(self, kind: str, **members: Any) -> type:
        """Register the in-tree plugin of this kind with other members."""
        record = self.registry.get(kind, BASES[kind])
        base = self.registry.load(record)
        made = type("Faulty", (base,), {"__module__": MODULE, **{name: _placed(value) for name, value in members.items()}})
        setattr(self.module, kind, made)
        part = self.registry.kind(kind, "theirs", "2.1")
        part.add("faulty", f"{MODULE}:{kind}", capabilities=record.capabilities)
        self.registry.commit(part)
        return made

    def prepare(self, *kinds: str, overlap: bool | None = None) -> Prepared:
        config: dict[str, Any] = {
            "model": {"path": str(self.folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"},
            "scheduler": {"max_running_requests": 4, "chunked_prefill_size": 64, "overlap": overlap},
            "cache": {"max_total_tokens": 256},
            "execution": {"device": "cpu", "threads": 1},
        }
        for kind in kinds:
            section, name = SECTIONS[kind]
            config.setdefault(section, {})[name] = ["faulty"] if kind == "logits_processor" else "faulty"
        return prepare(FrameConfig.model_validate(config))

    def start(self, *kinds: str, overlap: bool | None = None) -> Running:
        return Running(self.prepare(*kinds, overlap=overlap))


def _placed(value: Any) -> Any:
    """The member as if it were written in the plugin's module."""
    if isinstance(value, types.FunctionType):
        named = {**value.__globals__, "__name__": MODULE}
        placed = types.FunctionType(value.__code__, named, value.__name__, value.__defaults__, value.__closure__)
        placed.__kwdefaults__ = value.__kwdefaults__
        return placed
    return value


class Running:
    """An engine that a test drives step by step in its own thread."""

    def __init__(self, prepared: Prepared) -> None:
        self.received: list[AnyMessage] = []
        self.near, far = InProcessTransport.pair(self.received.append)
        self.engine: Engine = build_engine(prepared.resolved, prepared.registry, far)[0]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception:
            return

    def ask(self, *params: SamplingParams) -> list[tuple[Finish, int]]:
        """How requests with these parameters end, sent at once, and how many tokens each got."""
        messages = [Generate(rid=f"r{i}", token_ids=[5 + i] * 40, params=each) for i, each in enumerate(params)]
        self.near.send_all(messages)
        deadline = time.monotonic() + 60
        finishes: dict[str, Finish] = {}
        while len(finishes) < len(messages) and time.monotonic() < deadline and not self.fatal():
            time.sleep(0.005)
            for message in [m for m in self.received if isinstance(m, StepTokens)]:
                finishes |= {message.rids[i]: finish for i, finish in message.finishes.items()}
        tokens = self.tokens()
        return [(finishes[m.rid], len(tokens.get(m.rid, []))) for m in messages if m.rid in finishes]

    def tokens(self) -> dict[str, list[int]]:
        """What each request yielded, by rid."""
        found: dict[str, list[int]] = {}
        for message in [m for m in self.received if isinstance(m, StepTokens)]:
            for rid, tokens in zip(message.rids, message.token_ids, strict=True):
                found.setdefault(rid, []).extend(tokens)
        return found

    def fatal(self) -> str | None:
        return next((m.error for m in self.received if isinstance(m, Fatal)), None)

    def close(self) -> None:
        self.near.send(Control(id="close", action="shutdown"))
        self._thread.join(30)
        assert not self._thread.is_alive()


def make_faulty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """`folder` becomes a checkpoint of a tiny model."""
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    module = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return Faulty(folder, module, monkeypatch)
