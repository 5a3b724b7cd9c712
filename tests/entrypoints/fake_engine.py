"""A server whose engine runs a fake model: every process, socket and route is the real one, only
the tokens are invented.

`python -m tests.entrypoints.fake_engine serve --model FOLDER …` takes `frame serve`'s flags; the
folder needs config and tokenizer only. FRAME_FAKE_STEP, _START: seconds that a step, or the start,
takes; _PLAIN=1: tokens cost nothing and are not checked (for measurements); _FAIL=N: step N raises;
_TOKENS: tokens of the KV cache; _LEAK=memory, threads or files: each step keeps some (of memory 8
MB). A prompt that begins with one of these token ids is poison: _KILL: the process dies; _HANG: the
step never ends; _NAN: logits are not finite; _TEXT_KILL: the detokenizer's process dies at the
fifth token.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.engine import Engine, EngineOptions
from frame.core.interfaces.batch import StepResult
from frame.core.interfaces.runner import ModelRunner, WrappedRunner
from frame.core.ipc.inflight_file import INFLIGHT
from frame.core.messages import Ready
from frame.entrypoints.processes import worker
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.tracing import open_tracing
from frame.loading.engine_states import EngineStates
from frame.plugins.loader import load_configured
from frame.testing.fake_runner import DoneStep, FakeRunner
from frame.text.detokenizer import Detokenizer
from frame.text.incremental_decoder import TextStream

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from frame.config.resolved import Resolved
    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.interfaces.runner import PendingStep
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.ipc.transport import ZmqTransport
    from frame.core.scheduling.scheduler import Scheduler

HEARTBEAT = 0.2  # seconds


class PlainRunner(ModelRunner):
    """Tokens at no cost: the same few, in turn."""

    def __init__(self, vocab_size: int) -> None:
        self._tokens = (np.arange(4096, dtype=np.int32) * 7 + 11) % vocab_size

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        return DoneStep(StepResult(step=batch.step, token_ids=self._tokens[: int(batch.samples.sum())]))

    def close(self) -> None:
        return


class PacedRunner(WrappedRunner):
    """Another runner, slowed down to `seconds` a step, that fails once at step `fails_at`. `busy`
    is the processor time of the other."""

    def __init__(self, runner: ModelRunner, seconds: float, fails_at: int = -1) -> None:
        self.busy = 0.0
        super().__init__(runner)
        self._seconds = seconds
        self._fails_at = fails_at
        self._due = 0.0

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        if batch.step == self._fails_at:
            raise RuntimeError("the fake model was told to fail")
        started = time.thread_time()
        step = self._runner.launch(batch)
        self.busy += time.thread_time() - started
        now = time.perf_counter()
        self._due = max(self._due, now - self._seconds) + self._seconds
        time.sleep(max(0.0, self._due - now))
        return step


class PoisonedRunner(WrappedRunner):
    """Another runner, for requests that end or stop the engine: `kills` and `hangs` are the first
    token ids of prompts that do so."""

    def __init__(self, runner: ModelRunner, kills: int, hangs: int) -> None:
        super().__init__(runner)
        self._kills = kills
        self._hangs = hangs

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        entering = [int(setup.token_ids[0]) for setup in batch.setups]
        if self._kills in entering:
            os.kill(os.getpid(), signal.SIGABRT)  # as a library does whose check fails
        while self._hangs in entering:
            time.sleep(1.0)
        return self._runner.launch(batch)


class LeakingRunner(WrappedRunner):
    """Another runner, with something in its steps that keeps what it takes: 8 MB of `memory`, one
    of `threads`, or one of `files`."""

    def __init__(self, runner: ModelRunner, what: str) -> None:
        super().__init__(runner)
        self._leak: Callable[[], object] = {
            "memory": lambda: b"x" * (8 << 20),
            "threads": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
            "files": lambda: os.open(os.devnull, os.O_RDONLY),
        }[what]
        self._kept: list[object] = []

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        self._kept.append(self._leak())
        return self._runner.launch(batch)


class KillingDecoder:
    """Ends the process at the fifth token."""

    def __init__(self) -> None:
        self._count = 0

    def feed(self, token_id: int) -> str:
        self._count += 1
        if self._count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return "x"

    def flush(self) -> str:
        return ""


class PoisonedDetokenizer(Detokenizer):
    """Text as ever, but of prompts with the token `kills` near their end."""

    kills = -1

    def create_stream(self, params: SamplingParams, prompt_tail: Sequence[int] = ()) -> TextStream:
        return TextStream(KillingDecoder(), params) if self.kills in prompt_tail else super().create_stream(params, prompt_tail)


def make_runner(resolved: Resolved, scheduler: Scheduler) -> ModelRunner:
    """The runner that the environment asks for."""
    config = scheduler.config
    poison = {name: int(os.environ.get(f"FRAME_FAKE_{name}", "-1")) for name in ("KILL", "HANG", "NAN")}
    if os.environ.get("FRAME_FAKE_PLAIN"):
        runner: ModelRunner = PlainRunner(config.vocab_size)
    else:
        sizes = (config.num_pages, config.page_size, config.max_running, config.max_pages, config.vocab_size)
        runner = FakeRunner(*sizes, is_invalid=lambda tokens: tokens[0] == poison["NAN"])
    if max(poison["KILL"], poison["HANG"]) >= 0:
        runner = PoisonedRunner(runner, poison["KILL"], poison["HANG"])
    if leak := os.environ.get("FRAME_FAKE_LEAK"):
        runner = LeakingRunner(runner, leak)
    return PacedRunner(runner, float(os.environ.get("FRAME_FAKE_STEP", "0")), int(os.environ.get("FRAME_FAKE_FAIL", "-1")))


def schedule(resolved: Resolved, options: argparse.Namespace, transport: ZmqTransport, name: str) -> None:
    """The scheduler role with a fake model."""
    tokens = resolved.max_total_tokens or int(os.environ.get("FRAME_FAKE_TOKENS", "65536"))
    tracing = open_tracing(resolved, partial(load_configured, resolved.user.plugins), name)
    on_finish = None if tracing is None else tracing.add_engine_spans
    scheduler = build_scheduler(resolved, load_configured(resolved.user.plugins), tokens // resolved.page_size + 1, on_finish)
    info: dict[str, Any] = {"max_total_tokens": tokens, "page_size": resolved.page_size, "phases": {}}
    runner = make_runner(resolved, scheduler)
    engine = Engine(scheduler, runner, transport, EngineOptions(resolved.overlap, "fatal", HEARTBEAT, info, make_states=EngineStates))
    time.sleep(float(os.environ.get("FRAME_FAKE_START", "0")))
    scheduler.publish_inflight(Path(options.sockets) / INFLIGHT)
    events = worker.publish_kv_events(resolved, scheduler.list_kv_managers(), options.replica or 0)
    transport.send(Ready(process=name, pid=os.getpid(), data=info))
    worker.run_engine(engine, events, tracing)


def detokenize(resolved: Resolved, options: argparse.Namespace, transport: ZmqTransport, name: str) -> None:
    """The detokenizer role."""
    detokenizer = PoisonedDetokenizer(worker.tokenizer_of(resolved), worker.EARLY_LIMIT, worker.open_inflight_text(options))
    detokenizer.kills = int(os.environ.get("FRAME_FAKE_TEXT_KILL", "-1"))
    worker.detokenize(resolved, transport, name, detokenizer)


def serve(arguments: list[str]) -> int:
    """`frame serve` over fake engines."""
    from frame.entrypoints.cli.entry import open_closed_streams
    from frame.entrypoints.cli.options import config_command
    from frame.entrypoints.cli.serve import run
    from frame.entrypoints.configuration.sources import LoadedConfig

    codes: list[int] = []

    @config_command()
    def command(loaded: LoadedConfig) -> None:
        codes.append(run(loaded, "tests.entrypoints.fake_engine"))

    open_closed_streams()
    command.main(arguments, standalone_mode=False)
    return codes[0]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(serve(sys.argv[2:]))
    worker.run_process({"scheduler": schedule, "detokenizer": detokenize})
