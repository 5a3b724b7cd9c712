"""Rates of an engine with LoRA adapters beside the same engine without, each in a process of its
own, with dummy weights and random adapters of all linear layers.

    python benchmarks/lora.py --model shared/model_configs/llama-3.1-8b --out results/lora.json
    python benchmarks/lora.py --model … --rank 64 --adapters 8 --batches 64
    python benchmarks/lora.py --model … --rotate 60 --adapters 100 --places 8
    python benchmarks/lora.py --model … --invoke 8000 --adapters 1

`ratio` is the rate with adapters over that of the engine without (`off`): of `base` requests, of
requests with `one` adapter, and with `many`. `--rotate`: seconds of a stream of requests, four a
second, whose adapters come and go, beside the same stream with one resident adapter: gaps between
tokens, and the time to the first token. `--invoke`: the time to the first token after so many
tokens that the base model has computed, of an activated adapter (aLoRA) and of a plain one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, TOKENS = 128, 200  # tokens of a prompt and of an output
INVOCATION = [300, 301, 302]  # no prompt has these tokens


def make_adapters(folder: Path, model: Path, rank: int, count: int, *, is_activated: bool = False) -> list[str]:
    """-> NAME=FOLDER of adapters with the same tensors, which count as different versions.
    is_activated: the last one is active from INVOCATION on."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys), "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
    }  # fmt: skip
    prefixes = ["mlp"]
    if "num_experts" in config:
        inner, prefixes = config["moe_intermediate_size"], [f"mlp.experts.{expert}" for expert in range(config["num_experts"])]
    for prefix in prefixes:
        sizes |= {f"{prefix}.gate_proj": (hidden, inner), f"{prefix}.up_proj": (hidden, inner), f"{prefix}.down_proj": (inner, hidden)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.01
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{kind}.weight"] = values.cpu()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted({name.split(".")[-1] for name in sizes})}
    modules = []
    for number in range(count):
        place = folder / f"adapter-{number}"
        place.mkdir()
        file = place / "adapter_model.safetensors"
        if number:
            file.hardlink_to(folder / "adapter-0" / file.name)
        else:
            save_file(tensors, file)
        activated = {"alora_invocation_tokens": INVOCATION} if is_activated and number == count - 1 else {}
        (place / "adapter_config.json").write_text(json.dumps(settings | {"revision": str(number)} | activated))
        modules.append(f"a{number}={place}")
    return modules


def draw_prompt(length: int) -> list[int]:
    return [random.randint(10, 250) for _ in range(length)]


def open_engine(options: argparse.Namespace, modules: list[str]) -> tuple[Any, float]:
    from frame import Engine

    settings: dict[str, Any] = json.loads(options.settings)
    if modules:
        settings |= {"enable_lora": True, "max_loras": options.places, "max_lora_rank": options.rank, "max_cpu_loras": len(modules)}
    began = time.perf_counter()
    engine = Engine(model=str(options.model), load_format="dummy", dtype=options.dtype, skip_tokenizer_init=True, **settings)
    started = time.perf_counter() - began
    for module in modules:
        engine.load_lora_adapter(*module.split("=", 1))
    return engine, started


def measure_rates(engine: Any, options: argparse.Namespace, pick: Callable[[int], str | None]) -> dict[str, float]:
    """Tokens a second by batch size, and prompt tokens a second."""
    from frame import SamplingParams

    def run(count: int, length: int, tokens: int) -> float:
        prompts = [draw_prompt(length) for _ in range(count)]
        names = [pick(number) for number in range(count)]
        began = time.perf_counter()
        engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), lora=names if any(names) else None)
        return time.perf_counter() - began

    rates = {}
    for batch in options.batches:
        run(batch, PROMPT, 8)
        times = [run(batch, PROMPT, TOKENS + 8) - run(batch, PROMPT, 8) for _ in range(options.rounds)]
        rates[str(batch)] = round(batch * TOKENS / min(times), 1)
    run(16, options.long, 1)
    rates["prefill"] = round(16 * options.long / min(run(16, options.long, 1) for _ in range(options.rounds)), 1)
    return rates


def measure_first_tokens(engine: Any, options: argparse.Namespace, names: dict[str, str | None]) -> dict[str, float]:
    """Milliseconds to the first token after a prompt of the base model that is cached, by kind."""
    from frame import SamplingParams

    times: dict[str, list[float]] = {kind: [] for kind in names}
    for _ in range(options.rounds + 2):
        for kind, name in names.items():
            prefix = draw_prompt(options.invoke)
            engine.generate([prefix], SamplingParams(temperature=0.0, max_tokens=1))
            began = time.perf_counter()
            engine.generate([prefix + INVOCATION], SamplingParams(temperature=0.0, max_tokens=1), lora=name)
            times[kind].append(1000 * (time.perf_counter() - began))
    return {kind: round(statistics.median(each[2:]), 2) for kind, each in times.items()}


async def measure_stream(engine: Any, seconds: float, pick: Callable[[int], str]) -> dict[str, float]:
    """Four requests a second for so long: gaps between tokens and times to the first one, in
    milliseconds."""
    from frame import SamplingParams

    gaps: list[float] = []
    firsts: list[float] = []

    async def ask(number: int) -> None:
        last = began = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        async for _ in engine.astream(draw_prompt(PROMPT), params, lora=pick(number)):
            now = time.perf_counter()
            (gaps if last > began else firsts).append(1000 * (now - last))
            last = now

    tasks = []
    for number in range(int(4 * seconds)):
        tasks.append(asyncio.create_task(ask(number)))
        await asyncio.sleep(0.25)
    await asyncio.gather(*tasks)
    cut = statistics.quantiles(gaps, n=1000)
    return {
        "itl_p50": round(cut[499], 2), "itl_p99": round(cut[989], 2), "itl_max": round(max(gaps), 2),
        "ttft_p50": round(statistics.median(firsts), 2), "ttft_max": round(max(firsts), 2),
    }  # fmt: skip


def run_engine(options: argparse.Namespace) -> None:
    """What one process measures, as a line of JSON."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        count, is_activated = options.adapters + bool(options.invoke), bool(options.invoke)
        modules = make_adapters(Path(folder), options.model, options.rank, count, is_activated=is_activated) if options.run == "on" else []
        engine, report["start_seconds"] = open_engine(options, modules)
        if options.invoke:
            kinds = {"base": None, "activated": f"a{count - 1}", "plain": "a0"}
            report["first_token_ms"] = measure_first_tokens(engine, options, kinds)
        elif options.rotate and modules:
            asyncio.run(measure_stream(engine, 5, lambda number: "a0"))
            report["resident"] = asyncio.run(measure_stream(engine, options.rotate, lambda number: "a0"))
            report["rotating"] = asyncio.run(measure_stream(engine, options.rotate, lambda number: f"a{number % len(modules)}"))
        else:
            report["base"] = measure_rates(engine, options, lambda number: None)
            if modules:
                report["one"] = measure_rates(engine, options, lambda number: "a0")
                report["many"] = measure_rates(engine, options, lambda number: f"a{number % len(modules)}")
        engine.close()
    print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--places", type=int, help="adapters on the device; default: all")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--long", type=int, default=4096, help="tokens of each prompt of the prefill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--settings", default='{"max_model_len": 16384}', help="further settings of the engine, as JSON")
    parser.add_argument("--rotate", type=float, default=0.0, help="seconds of a stream of requests whose adapters come and go")
    parser.add_argument("--invoke", type=int, default=0, help="tokens of the base model's prompt before an adapter is invoked")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", choices=["off", "on"], help="measure in this process")
    options = parser.parse_args()
    options.places = options.places or options.adapters + bool(options.invoke)
    if options.run:
        run_engine(options)
        return
    report: dict[str, Any] = {"arguments": {key: str(value) for key, value in vars(options).items() if key not in ("out", "run")}}
    report["arguments"]["model"] = options.model.name
    for name in ("on",) if options.rotate or options.invoke else ("off", "on"):
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--run", name], stdout=subprocess.PIPE, text=True, check=True)
        report[name] = json.loads(done.stdout.splitlines()[-1])
    if "off" in report:
        base = report["off"]["base"]
        report["ratio"] = {kind: {key: round(report["on"][kind][key] / base[key], 3) for key in base} for kind in ("base", "one", "many")}
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
