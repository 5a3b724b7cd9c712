"""The six reference workloads on several models, beside the engines measured in `peers_h200.json`;
prints a table and stores JSON.

Each model runs in a process of its own: random weights in bf16, token ids, forced lengths, no
prompt twice. What a model has finished stays when it dies or its time is over.

    python benchmarks/h200_table.py configs/qwen3-0.6b configs/llama-3.1-8b --json table.json
    python benchmarks/h200_table.py configs/qwen3-14b --only batch8 --set attention_backend=triton
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from frame.checkpoint.model_config import find_model, read_model_config
from frame.core.errors import CheckpointError
from frame.core.interfaces.model import ModelConfig
from frame.entrypoints.tools.bench.floors import H200, Ceilings, ModelCost, floor_seconds
from frame.entrypoints.tools.bench.workload import Workload, reference_workloads

PEERS = Path(__file__).with_name("peers_h200.json")
CARD = Path(__file__).with_name("card_ceilings.py")
ORDER = ("single", "batch8", "prefix", "prefill", "longctx", "mixed256")  # the longest last
SPARE = 5.0  # seconds that a process gets to end by itself


# ---- one model, in a process of its own ----------------------------------------------------------


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def run_model(arguments: argparse.Namespace) -> None:
    """Every workload on one engine; a line of JSON for each event."""
    from frame import Engine

    deadline = time.monotonic() + arguments.budget
    keys: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    if arguments.max_len:
        keys["max_model_len"] = arguments.max_len
    keys |= {key: _value(text) for key, _, text in (setting.partition("=") for setting in arguments.set)}
    with Engine(model=str(find_model(arguments.models[0])), **keys) as engine:
        tell(event="ready", info=engine.info)
        vocabulary = engine.info["vocab_size"]
        began = time.perf_counter()
        _warm_up(engine, vocabulary, arguments.shrink)
        tell(event="warm", seconds=round(time.perf_counter() - began, 2))
        for name, workload in chosen(arguments).items():
            runs: list[tuple[float, int]] = []
            for number in range(1 if name == "mixed256" else arguments.repeats):
                if runs and time.monotonic() + runs[0][0] > deadline:
                    break
                runs.append(_seconds(engine, workload, vocabulary, number))
                seconds, tokens = min(runs)
                tell(event="row", workload=name, row=_row(workload, seconds, tokens) | {"all_seconds": [round(run[0], 4) for run in runs]})
            if time.monotonic() > deadline:
                break
    tell(event="done")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _warm_up(engine: Any, vocabulary: int, shrink: int) -> None:
    """One request alone, then a batch that is drawn from a distribution, as in the peers' runs."""
    import random

    draw = random.Random(1)
    lowest = min(10, vocabulary - 1)
    batch = [[draw.randrange(lowest, min(10_000, vocabulary)) for _ in range(max(1, 512 // shrink))] for _ in range(max(1, 64 // shrink))]
    alone = Workload([batch[0][: max(1, 128 // shrink)]], [max(1, 16 // shrink)])
    _seconds(engine, alone, vocabulary, -1)
    _seconds(engine, Workload(batch, [max(1, 32 // shrink)] * len(batch), temperature=0.6), vocabulary, -2)


def _seconds(engine: Any, workload: Workload, vocabulary: int, number: int) -> tuple[float, int]:
    """(seconds of one round, its output tokens)."""
    from frame import SamplingParams

    jobs = workload.jobs(vocabulary, number)
    params = [SamplingParams(temperature=job.temperature, ignore_eos=True, max_tokens=job.output) for job in jobs]
    began = time.perf_counter()
    outputs = engine.generate([job.prompt for job in jobs], params)
    return time.perf_counter() - began, sum(len(output.token_ids) for output in outputs)


def _row(workload: Workload, seconds: float, tokens: int) -> dict[str, Any]:
    prompts = sum(map(len, workload.prompts))
    figure = prompts if workload.counts == "prompt" else tokens
    return {
        "prompt_tokens": prompts,
        "output_tokens": tokens,
        "complete": tokens == sum(workload.outputs),
        "seconds": round(seconds, 4),
        "counts": workload.counts,
        "tokens_per_s": round(figure / seconds, 1),
    }


# ---- all models ----------------------------------------------------------------------------------


def chosen(arguments: argparse.Namespace) -> dict[str, Workload]:
    """The workloads to run, in order."""
    every = reference_workloads()
    names = arguments.only.split(",") if arguments.only else ORDER
    if unknown := [name for name in names if name not in every]:
        raise SystemExit(f"--only {unknown[0]}: there are {', '.join(every)}")
    return {name: every[name].shrunk(arguments.shrink) if arguments.shrink > 1 else every[name] for name in names}


def measure(model: str, arguments: argparse.Namespace, budget: float) -> dict[str, Any]:
    """One model's process: its events as a report, as far as it came within `budget` seconds."""
    command = [sys.executable, __file__, model, "--one", "--budget", str(budget), *_passed_on(arguments)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    timer = threading.Timer(budget + SPARE, _kill, [process])
    timer.start()
    found: dict[str, Any] = {"rows": {}, "ended": "died"}
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line) if line.startswith('{"event"') else {}
        kind = event.pop("event", None)
        if kind == "ready":
            found |= {"seconds_to_ready": round(time.monotonic() - began, 1), "engine": event["info"]}
            about = {key: event["info"].get(key) for key in ("phases", "kernels", "cuda_graph_max_bs")}
            print(f"{model}: ready after {found['seconds_to_ready']} s {about}", flush=True)
        elif kind == "warm":
            found["warm_up_seconds"] = event["seconds"]
        elif kind == "row":
            found["rows"][event["workload"]] = event["row"]
            print(f"{model}: {event['workload']} {event['row']['tokens_per_s']:,.1f} tokens/s, {event['row']['all_seconds']} s", flush=True)
        elif kind == "done":
            found["ended"] = "done"
    code = process.wait()
    timer.cancel()
    if found["ended"] != "done" and code == -signal.SIGKILL and time.monotonic() - began >= budget:
        found["ended"] = f"out of time ({budget:.0f} s)"
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _passed_on(arguments: argparse.Namespace) -> list[str]:
    passed = ["--repeats", str(arguments.repeats), "--shrink", str(arguments.shrink), "--max-len", str(arguments.max_len)]
    for setting in arguments.set:
        passed += ["--set", setting]
    return passed + (["--only", arguments.only] if arguments.only else [])


def card() -> dict[str, Any]:
    """What the card reaches at best, read in this run."""
    done = subprocess.run([sys.executable, CARD], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    print(
        f"read {found['read'] / 1e12:.2f} TB/s, copy {found['copy'] / 1e12:.2f} TB/s, products {found['operations'] / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return found


def compared(model_config: ModelConfig, model: str, found: dict[str, Any], arguments: argparse.Namespace, ceilings: Ceilings) -> None:
    """Adds to each row the peers' figures, goal and floor, and how the row stands to them.
    Quantized weights have no floor here."""
    peers = _peers(model)
    cost = None if any(setting.startswith("quantization") for setting in arguments.set) else ModelCost.of(model_config)
    for name, row in found["rows"].items():
        workload = chosen(arguments)[name]
        if arguments.shrink == 1:
            row |= peers.get("workloads", {}).get(name, {})
        if cost is not None:
            floor = floor_seconds(cost, ceilings, [len(prompt) for prompt in workload.prompts], workload.outputs, workload.shared)
            row |= {"floor_seconds": round(floor, 4), "share_of_floor": round(floor / row["seconds"], 3)}
        if row.get("peers"):
            row["to_best_peer"] = round(row["tokens_per_s"] / max(row["peers"].values()), 3)
            row["to_goal"] = round(row["tokens_per_s"] / row["goal"], 3)
    found["peers_seconds_to_ready"] = peers.get("seconds_to_ready", {})


def _peers(model: str) -> dict[str, Any]:
    models = json.loads(PEERS.read_text())["models"]
    return next((figures for name, figures in models.items() if name.lower() == Path(model).name.lower()), {})


def show(models: dict[str, dict[str, Any]]) -> None:
    names = ("vLLM", "SGLang", "mini-sglang")
    titles = ("model", "workload", "frame", *names, "to best", "goal", "to goal", "of floor")
    lines = [titles]
    for model, found in models.items():
        for name in reference_workloads():
            if row := found["rows"].get(name):
                peers = (row.get("peers", {}).get(peer) for peer in names)
                shares = (row.get(key) for key in ("to_best_peer", "goal", "to_goal", "share_of_floor"))
                lines.append((model, name, *map(_shown, (row["tokens_per_s"], *peers, *shares))))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        left, right = line[:2], line[2:]
        print(*map(str.ljust, left, widths[:2]), *map(str.rjust, right, widths[2:]), sep="  ")
    for model, found in models.items():
        print(f"{model}: ready after {found.get('seconds_to_ready', '–')} s; {found['ended']} after {found['seconds']} s")


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders with a config.json; a peer's figures are found by the folder's name")
    parser.add_argument("--only", default="", help="workloads, with commas between them, in this order")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for everything; the models left share what is left")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of each workload but mixed256, of which the best counts")
    parser.add_argument("--max-len", type=int, default=16_384, help="longest request; 0: the model's own")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a keyword of frame.Engine")
    parser.add_argument("--shrink", type=int, default=1, help="divide requests and lengths by this, for small machines")
    parser.add_argument(
        "--ceilings", choices=("measured", "h200"), default="measured", help="what floors are reckoned with: read first, or known"
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen(arguments)
    try:
        model_config = [read_model_config(model) for model in arguments.models]  # a wrong path is found before anything runs
    except CheckpointError as error:
        raise SystemExit(str(error)) from None
    if arguments.one:
        run_model(arguments)
        return
    from frame.entrypoints.tools.bench.report import report

    read = card() if arguments.ceilings == "measured" else {}
    ceilings = Ceilings(read["read"], read["operations"], read["copy"]) if read else H200
    deadline, models = time.monotonic() + arguments.budget, dict[str, dict[str, Any]]()
    for number, model in enumerate(arguments.models):
        share = (deadline - time.monotonic()) / (len(arguments.models) - number)
        models[Path(model).name] = found = measure(model, arguments, max(1.0, share - SPARE))
        compared(model_config[number], model, found, arguments, ceilings)
        if arguments.json:  # after each model: what is measured is kept
            about = {
                "settings": arguments.set,
                "shrink": arguments.shrink,
                "ceilings": read,
                "peers": json.loads(PEERS.read_text())["about"],
            }
            arguments.json.write_text(json.dumps(report("h200-table", models, **about), indent=2) + "\n")
    show(models)


if __name__ == "__main__":
    main()
