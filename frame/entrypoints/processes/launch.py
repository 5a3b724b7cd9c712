"""Parts of an engine's start: the tokenizer, the limits that its clients check, and the wait until
every process is ready.

Used by the offline sessions and by the servers. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frame.config.resolved import Resolved
from frame.core.messages import Ready
from frame.entrypoints.engine_client.limits import ClientLimits
from frame.entrypoints.processes.deployment import Deployment
from frame.text.tokenizer import Tokenizer


def load_tokenizer(resolved: Resolved) -> Tokenizer | None:
    """The tokenizer; None where `--skip-tokenizer-init` skips it."""
    if resolved.tokenizer_path is None:
        return None
    user = resolved.user
    tokenizer = Tokenizer.load(resolved.tokenizer_path, user.text.chat_template, trust_remote_code=user.model.trust_remote_code)
    if resolved.model.sentence is not None and resolved.model.sentence.lower_case:
        tokenizer.lower_case()
    return tokenizer


def get_client_limits(resolved: Resolved, info: dict[str, Any]) -> ClientLimits:
    """The limits that a client of this engine checks requests against."""
    return ClientLimits(
        max_outstanding=resolved.plan.dp * resolved.max_running_requests + resolved.user.scheduler.max_queued_requests,
        max_context=resolved.max_context,
        vocab_size=resolved.model.vocab_size,
        capacity=int(info["max_total_tokens"]),
        is_pooling=resolved.pooling is not None,
        grammar=bool(resolved.plugins.get("grammar_backend")) and resolved.tokenizer_path is not None,
        grammar_processes=resolved.user.sampling.grammar_workers > 0,
        request_timeout=resolved.user.scheduler.request_timeout,
        seed=resolved.user.model.seed,
        refused_params=resolved.refused_params,
        custom_params=resolved.custom_params,
        hidden_size=resolved.model.hidden_size,
    )


def wait_ready(
    deployment: Deployment,
    report: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
    started: float | None = None,
) -> dict[str, Any]:
    """Wait until every process is ready; returns the data of the engine's `Ready`. `check` is
    called now and then, and may raise. `started`: the `time.perf_counter()` that `report` counts
    from; None: now. Raises ConfigurationError or RuntimeError with the error of
    a child that failed."""
    info: dict[str, Any] = {}
    waiting = set(deployment.names)
    started = time.perf_counter() if started is None else started
    while waiting:
        for message in deployment.transport.receive(0.1):
            deployment.handle_message(message)
            if isinstance(message, Ready):
                waiting.discard(message.process)
                info = message.data or info
                if report is not None:
                    seconds = time.perf_counter() - started
                    report(f"{message.process} ready after {seconds:.1f} s{describe_phases(message.data, seconds)}")
        check()
        error = deployment.get_start_error()
        if error is not None:
            raise error
    return info


def find_process_start() -> float:
    """The `time.perf_counter()` at which this process was started; now, where /proc does not say
    it. To 0.01 s: psutil rounds the time of boot to seconds."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.perf_counter() - max(0.0, age)


def describe_phases(data: dict[str, Any], total: float) -> str:
    """The phases of the engine's start, which follow each other, and the rest of `total` seconds:
    as printed, they add up to it."""
    phases = {name: round(seconds, 1) for name, seconds in (data.get("phases") or {}).items()}
    rest = round(round(total, 1) - sum(phases.values()), 1)
    shown = [f"{name} {seconds:.1f} s" for name, seconds in {**phases, "other": rest}.items()]
    if kernels := data.get("kernels"):
        shown.append(f"{kernels['cache']} kernel cache: {kernels['loaded']} loaded, {kernels['compiled']} compiled")
    return f" ({', '.join(shown)}; {data['max_total_tokens']} tokens of KV cache)" if phases else ""
