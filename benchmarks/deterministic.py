"""Speed of the batch-invariant mode against its absence, on random weights: decode steps of several
batches, and prompts; prints a table and writes JSON.

Llama-3.1-8B's shape, or Qwen3-30B-A3B's with fewer layers. Scheduler and runner share one thread,
without text and transport. Each mode has a process of its own, because it sets what cuBLAS reads at
its first use.

    python benchmarks/deterministic.py --out deterministic.json
    python benchmarks/deterministic.py --model qwen3-moe --layers 12
    python benchmarks/deterministic.py --layers 8 --profile 1
    python benchmarks/deterministic.py --model tiny --device cpu --batches 1 4 --context 32
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2,
    "bos_token_id": 1, "hidden_act": "silu",
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_key_value_heads": 4,
    "num_hidden_layers": 12, "vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960,
}  # fmt: skip
TINY = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16, "vocab_size": 512, "torch_dtype": "float32"}  # fmt: skip
SHAPES = {"llama": LLAMA, "qwen3-moe": QWEN3_MOE, "tiny": TINY}


def make_loop(args: argparse.Namespace, folder: str, *, deterministic: bool) -> LocalLoop:
    maximum = max(args.batches)
    config: dict[str, Any] = {
        "model": {"path": folder, "load_format": "dummy", "skip_tokenizer_init": True, "max_context": max(8192, 2 * args.prompt_tokens)},
        "cache": {"max_total_tokens": maximum * (args.context + args.steps + 32) + args.prompts * args.prompt_tokens + 16384},
        "scheduler": {"max_running_requests": maximum, "chunked_prefill_size": args.chunk},
        "execution": {"device": args.device, "deterministic": deterministic},
    }
    if args.device == "cuda":
        config["execution"]["cuda_graph_max_bs"] = maximum
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


def draw(args: argparse.Namespace, length: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, SHAPES[args.model]["vocab_size"]) for _ in range(length)]


def measure_decodes(loop: LocalLoop, args: argparse.Namespace, batch: int, recorder: torch.profiler.profile | None = None) -> float:
    """The median milliseconds of steps in which all rows decode."""
    params = SamplingParams(temperature=0.0, max_tokens=args.steps + 8, ignore_eos=True)
    for row in range(batch):
        loop.add_request(draw(args, args.context, 1000 * batch + row), params)
    times, last, full = [], time.perf_counter(), 0
    for step in loop.run_checked():
        now = time.perf_counter()
        full = full + 1 if len(step.rids) == batch and not step.num_cached_tokens else 0
        if full > 4:  # graphs and overlap are in their stride
            times.append(now - last)
        if recorder is not None and full in (5, 21):
            (recorder.start if full == 5 else recorder.stop)()
        last = now
    return 1e3 * statistics.median(times)


def measure_prompts(loop: LocalLoop, args: argparse.Namespace, seed: int) -> float:
    """Prompt tokens per second."""
    prompts = [draw(args, args.prompt_tokens, seed + number) for number in range(args.prompts)]
    began = time.perf_counter()
    loop.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return args.prompts * args.prompt_tokens / (time.perf_counter() - began)


def profile(loop: LocalLoop, args: argparse.Namespace, batch: int) -> None:
    """Print the device's time by kernel over 16 decode steps."""
    recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    measure_decodes(loop, args, batch, recorder)
    times = [(each.self_device_time_total / 16e3, each) for each in recorder.key_averages()]
    for milliseconds, each in sorted(times, key=lambda pair: -pair[0])[:16]:
        print(f"    {milliseconds:8.4f} ms {each.count / 16:6.1f} x {each.key[:110]}")


def measure(args: argparse.Namespace, folder: str, *, deterministic: bool) -> dict[str, float]:
    began = time.perf_counter()
    loop = make_loop(args, folder, deterministic=deterministic)
    row = {"start_s": time.perf_counter() - began}
    print(f"deterministic {deterministic}: started in {row['start_s']:.1f} s, {loop.scheduler.config.overlap=}", flush=True)
    measure_prompts(loop, args, 1)
    row["prompt_tokens_per_s"] = max(measure_prompts(loop, args, seed) for seed in (1 << 20, 1 << 21))
    for batch in args.batches:
        row[f"decode_{batch}_ms"] = measure_decodes(loop, args, batch)
        if args.profile == batch:
            profile(loop, args, batch)
    return row


def run_alone(folder: str, mode: str) -> dict[str, float]:
    """`measure` in a process of its own."""
    result = Path(folder, f"{mode}.json")
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--mode", mode, "--folder", folder, "--out", str(result)], check=True)
    row: dict[str, float] = json.loads(result.read_text())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt before its decodes")
    parser.add_argument("--steps", type=int, default=48, help="decode steps")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--profile", type=int, metavar="BATCH", help="print the kernels of decodes of this batch")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--mode", choices=("off", "on"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        args.out.write_text(json.dumps(measure(args, args.folder, deterministic=args.mode == "on")))
        return
    shape = dict(SHAPES[args.model]) | ({"num_hidden_layers": args.layers} if args.layers else {})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        off, on = (run_alone(folder, mode) for mode in ("off", "on"))
    print(f"{'':>22} {'off':>12} {'on':>12} {'kept':>7}")
    for name, value in off.items():
        kept = on[name] / value if name.endswith("per_s") else value / on[name]
        print(f"{name:>22} {value:12.2f} {on[name]:12.2f} {kept:7.3f}")
    if args.out:
        card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        args.out.write_text(json.dumps({"device": card, "model": args.model, "layers": shape["num_hidden_layers"], "off": off, "on": on}))


if __name__ == "__main__":
    main()
