"""Runs the steps of a start that can refuse it, without weights, child processes or requests, by
the code of the start itself. Used by `frame config check`. Imports torch when it is called."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from frame.core.blame import blaming, explain
from frame.core.errors import ConfigurationError, PluginError
from frame.entrypoints.configuration.prepare import Prepared
from frame.entrypoints.http.start import open_listeners
from frame.entrypoints.processes.deployment import create_launcher
from frame.entrypoints.processes.launch import load_tokenizer

GIB = 1024**3


def check_start(prepared: Prepared, report: Callable[[str], None]) -> None:
    """Raise what the start of `frame serve` raises: ConfigurationError, or RuntimeError for the
    failure of a process. `report` gets a line for each thing that was checked."""
    from frame.entrypoints.http.extensions.loading import load_extensions  # imports FastAPI

    resolved, registry = prepared.resolved, prepared.registry
    for listener in open_listeners(resolved):
        listener.close()
    report("ports, TLS and folders of the server")
    with tempfile.TemporaryDirectory() as folder:
        create_launcher(resolved, registry, resolved.plan.num_ranks, Path(folder)).close()
    load_extensions(resolved, registry)
    report("routes of the server and its extensions")
    tokenizer = load_tokenizer(resolved)
    if tokenizer is None:
        report("no tokenizer: model.skip_tokenizer_init")
    else:
        report(f"tokenizer: {tokenizer.vocab_size:,} tokens, {'a' if tokenizer.has_chat_template else 'no'} chat template")
    try:
        _check_engine(prepared, report)
    except PluginError as error:
        raise PluginError(f"engine: {error}") from error  # as the worker reports it
    except ConfigurationError:
        raise
    except Exception as error:
        raise RuntimeError(explain(error)) from error


@blaming("at start")
def _check_engine(prepared: Prepared, report: Callable[[str], None]) -> None:
    """The start of the engine up to the first weight, of one rank of each stage."""
    from frame.entrypoints.processes.build_engine import build_grammars, create_platform
    from frame.entrypoints.processes.build_scheduler import build_schedulers
    from frame.entrypoints.processes.join_groups import Place
    from frame.entrypoints.processes.planned_rank import PlannedRank

    resolved, registry = prepared.resolved, prepared.registry
    platform = create_platform(resolved, registry, Place())
    platform.activate()
    before = platform.measure_memory()
    for stage in range(resolved.plan.pp):
        rank = PlannedRank(resolved, registry, stage)
        where = f"stage {stage}: " if resolved.plan.pp > 1 else ""
        if (plan := rank.plan_memory(before)) is not None:
            sizes = f"{plan.weights / GIB:.2f} GiB of weights and {plan.tokens:,} tokens of KV cache in {plan.total / GIB:.2f} GiB"
            report(f"{where}memory of a rank: {sizes}")
        if rank.check_weights():
            report(f"{where}weights: names and shapes of all tensors, by the headers of their files")
        else:
            report(f"{where}weights: the files' headers alone; this model or format needs values for more")
    build_schedulers(resolved, registry, resolved.max_running_requests + 1)
    build_grammars(resolved, registry)
    report("scheduler and grammar backend")
