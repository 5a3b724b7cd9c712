"""Adapters for tests of the main process: folders as PEFT writes them, and an engine's side of the
orders that load them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Abort, Control, ControlReply, Finish, Generate, StepTokens
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import ClientLimits
from frame.entrypoints.engine_client.response_state import RequestState
from tests.entrypoints.submitting import Link

CONFIG = b'{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "base_model_name_or_path": "tiny"}'
LIMITS = ClientLimits(max_outstanding=256, max_context=64, vocab_size=100, capacity=1000)


def tensors(content: bytes, header: Any = None) -> bytes:
    """A safetensors file with one tensor of these bytes."""
    header = {"a.weight": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}} if header is None else header
    encoded = header if isinstance(header, bytes) else msgspec.json.encode(header)
    return struct.pack("<Q", len(encoded)) + encoded + content


def make_adapter(folder: Path, content: bytes = b"1", config: bytes = CONFIG) -> Path:
    """An adapter whose digest depends on `content`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(tensors(content))
    return folder


class AdapterOrders:
    """What an engine does with orders: holds at most `room` adapters. `refuses`: digest -> why. It
    answers by `reply`, after `pause` seconds; `is_silent`: not at all."""

    def __init__(self, reply: Callable[[ControlReply], None]) -> None:
        self.held: list[str] = []
        self.loads: list[str] = []
        self.users: dict[str, str] = {}  # of running requests, by rid: digest
        self.room = 1000
        self.refuses: dict[str, str] = {}
        self.pause = 0.0
        self.is_silent = False
        self.reply = reply

    def take(self, message: Any) -> bool:
        """Whether the message is an order, which is carried out."""
        if isinstance(message, Generate) and message.adapter:
            assert message.adapter in self.held, "a request came before its adapter"
            self.users[message.rid] = message.adapter
        for rid in message.rids if isinstance(message, Abort) else ():
            self.users.pop(rid, None)
        if not isinstance(message, Control) or message.action not in ("load_adapter", "unload_adapter"):
            return False
        if not self.is_silent:
            asyncio.get_running_loop().call_later(self.pause, self._answer, message)
        return True

    def _answer(self, message: Control) -> None:
        digest, error = message.arguments["digest"], None
        code: Literal["conflict"] | None = None
        if message.action == "load_adapter":
            files = {path.name for path in Path(message.arguments["folder"]).iterdir()}
            assert files == {"adapter_config.json", "adapter_model.safetensors"}
            self.loads.append(digest)
            if digest in self.refuses:
                error = self.refuses[digest]
            elif digest not in self.held and len(self.held) >= self.room:
                code, error = "conflict", "the host memory of adapters is full"
            elif digest not in self.held:
                self.held.append(digest)
        elif digest in self.users.values():
            code, error = "conflict", "requests use the adapter"
        elif digest in self.held:
            self.held.remove(digest)
        data = {"rank": 8, "pages": 1, "bytes": 100, "base_model": "tiny", "invocation": []}
        self.reply(ControlReply(id=message.id, ok=error is None, data={} if error else data, error=error, code=code))


class AdapterLink(Link):
    """A transport to an engine that is played by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.client = EngineClient(self, LIMITS)  # type: ignore[arg-type]
        self.orders = AdapterOrders(lambda reply: self.client.handle_messages([reply]))

    def send(self, message: Any) -> None:
        if not self.orders.take(message):
            self.sent.append(message)

    def start(self, use: Any, rid: str) -> RequestState:
        """Start a request, as `start_request` does; the caller's hold on the adapter ends."""
        request = self.client.prepare_request([[1, 2]], [SamplingParams(max_tokens=8)], rid)
        request.sequences[0].recovery.adapter = use
        self.client.reserve_sequences(1)
        self.client.start_sequence(request.sequences[0])
        if use is not None:
            use.version.release()
        return request

    def finish(self, request: RequestState, reason: Any = "stop") -> None:
        """The engine ends a request."""
        rid = request.sequences[0].recovery.engine_rid
        self.orders.users.pop(rid, None)
        self.client.handle_messages([StepTokens(rids=[rid], token_ids=[[5]], finishes={0: Finish(reason)})])

    def crash(self) -> None:
        """The engine ends, and nothing is left of it."""
        self.orders.held.clear()
        self.orders.users.clear()
        self.client.record_loss()
        self.client.begin_recovery("the engine crashed", {})
