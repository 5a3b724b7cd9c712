"""Output rate of Llama-3.1-8B's shape with an EAGLE-3 head, against no drafts, with random weights
and synthetic acceptance; writes JSON.

For each batch and each mean acceptance length: draft lengths 1, 2 and 3 fixed, and adaptive, in
steps of decodes alone, after a warm-up. The engine without a drafter is measured first and freed.
Scheduler and runner share one thread, without text and transport. Steps take longer as texts grow,
so a ratio is to the rate without drafts at the same mean length of the texts, which is interpolated
between two measurements. Prompts are not computed: the cache has random keys and values.

Trees (`--trees 4x7`: eagle_topk and drafted tokens, in 3 passes) are those of the random head, of
which nearly none is accepted: `break_even` is the number of tokens a step at which the rate is that
without drafts. A step that accepts more copies their keys besides. Chains of 3 are measured beside
them in the same way.

    python benchmarks/speculative_gpu.py --out speculative-gpu.json
    python benchmarks/speculative_gpu.py --batches 1 8 --context 32000 --lengths 1 3 --fixed 3
    python benchmarks/speculative_gpu.py --batches 64 --lengths 3 --profile
    python benchmarks/speculative_gpu.py --batches 1 8 64 --lengths --trees 2x7 4x7 4x15
    python benchmarks/speculative_gpu.py --tiny --device cpu --batches 2 --seconds 0.1
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from deterministic import LLAMA

from frame.config.schema import FrameConfig
from frame.core.interfaces.batch import ForwardBatch, HiddenStateOutputs
from frame.core.interfaces.drafter import MAX_STEPS, Drafter
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Generate
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.speculation.synthetic_acceptance import SyntheticAcceptance
from frame.testing.local_loop import LocalLoop

NUM_STEPS = 3
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 512, "torch_dtype": "float32"}  # fmt: skip


def write_folder(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_loop(
    args: argparse.Namespace, root: Path, *, drafts: bool, tree: tuple[int, int] | None = None
) -> tuple[LocalLoop, Drafter | None]:
    """tree: branches and drafted tokens, without synthetic acceptance."""
    shape = LLAMA | (TINY if args.tiny else {})
    target, head = root / "target", root / "head"
    if not target.exists():
        write_folder(target, shape)
        extra = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": shape["vocab_size"] // 4}
        write_folder(head, shape | extra)
    maximum = max(args.batches)
    config: dict[str, Any] = {
        "model": {"path": str(target), "load_format": "dummy", "skip_tokenizer_init": True, "max_context": args.context + args.room},
        "cache": {"max_total_tokens": maximum * (args.context + min(args.room, 1000)) + 8192},
        "scheduler": {"max_running_requests": maximum},
        "execution": {"device": args.device, "cuda_graph_max_bs": 0 if args.device == "cpu" else args.graphs, "prompt_graph_max_tokens": 0},
    }
    if args.apart:
        config["plugins"] = {"options": {"attention_backend/triton": {"share_prefixes": False}}}
    if drafts:
        config["speculative"] = {
            "algorithm": "eagle3", "num_steps": NUM_STEPS, "draft_model_path": str(head), "synthetic_acceptance_length": 1.0,
        }  # fmt: skip
    if tree is not None:
        config["speculative"] |= {"synthetic_acceptance_length": None, "adaptive": False}
        options = {"eagle_topk": tree[0], "num_draft_tokens": tree[1] + 1}
        config.setdefault("plugins", {"options": {}})["options"]["drafter/eagle3"] = options
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    skip_prompts(runner, shape)
    loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
    chosen = prepared.resolved.choice("drafter") if drafts else None
    return loop, None if chosen is None else prepared.registry.create(chosen, prepared.resolved.drafter_context)


def skip_prompts(runner: Any, shape: dict[str, Any]) -> None:
    """Fill the cache with random numbers, and replace the forward passes of prompts by zeros."""
    compute = runner.forward
    for layer in range(shape["num_hidden_layers"]):
        for tensor in runner.inputs.kv.layer(layer):
            tensor.normal_()

    def forward(batch: ForwardBatch) -> torch.Tensor:
        if int(batch.host.query_lens.max()) <= MAX_STEPS + 1:
            return compute(batch)
        hidden = torch.zeros(len(batch.token_ids), shape["hidden_size"], dtype=runner.context.dtype, device=runner.context.device)
        hidden_outputs = batch.get(HiddenStateOutputs)
        if hidden_outputs is not None:
            hidden_outputs.states.update(dict.fromkeys(hidden_outputs.layers, hidden))
        return hidden

    runner.forward = forward


def profile(loop: LocalLoop, args: argparse.Namespace, batch: int) -> None:
    """Print the device's time by kernel, in milliseconds a step."""
    activity = torch.profiler.ProfilerActivity
    is_gpu = args.device == "cuda"
    recorder = torch.profiler.profile(activities=[activity.CUDA if is_gpu else activity.CPU])
    row = measure(loop, args, batch, 0.2, args.seconds, recorder)
    times = [
        ((each.self_device_time_total if is_gpu else each.self_cpu_time_total) / 1e3 / row["steps"], each)
        for each in recorder.key_averages()
    ]
    for milliseconds, each in sorted(times, key=lambda pair: -pair[0])[:35]:
        print(f"  {milliseconds:8.4f} ms {each.count / row['steps']:7.1f} x {each.key[:120]}")
    print(f"  {sum(pair[0] for pair in times):8.4f} ms in all, of {row['ms_per_step']:.3f} ms a step of {batch} rows", flush=True)


def measure(
    loop: LocalLoop, args: argparse.Namespace, batch: int, warm_up: float, seconds: float, recorder: torch.profiler.profile | None = None
) -> dict[str, float]:
    """Output tokens and steps per second from `warm_up` seconds after the last prompt on. recorder:
    records this time."""
    numbers, waiting = random.Random(batch), set()
    for row in range(batch):
        prompt = [numbers.randrange(3, 500) for _ in range(args.context)]
        params = SamplingParams(temperature=0.0, max_tokens=args.room, ignore_eos=True, num_speculative_tokens=None)
        waiting.add(rid := f"{time.monotonic_ns()}-{row}")
        refusal = loop.scheduler.add_request(Generate(rid=rid, token_ids=prompt, params=params))
        if refusal is not None:
            raise RuntimeError(refusal.error)
    began = end = None
    tokens = steps = before = 0
    load: dict[str, Any] = {}
    for message in loop.run_steps():
        now = time.perf_counter()
        if began is None:
            before += sum(map(len, message.token_ids))
        if waiting:
            waiting -= {rid for rid, ids in zip(message.rids, message.token_ids, strict=True) if ids}
            ready = now + warm_up
        elif end is not None:
            pass  # the requests leave
        elif began is None:
            if now >= ready:
                if recorder is not None:
                    recorder.start()
                began, load = time.perf_counter(), loop.scheduler.get_load()
        else:
            tokens, steps = tokens + sum(map(len, message.token_ids)), steps + 1
            if now >= began + seconds or message.finishes:
                end, after = now, loop.scheduler.get_load()
                if recorder is not None:
                    recorder.stop()
                loop.scheduler.abort_all()
    if began is None or end is None:
        raise RuntimeError(f"{args.room} tokens end before {warm_up + seconds} seconds; raise --room")
    drafted, accepted = (after.get(name, 0) - load.get(name, 0) for name in ("drafted_tokens", "accepted_tokens"))
    return {
        "tokens_per_second": tokens / (end - began),
        "ms_per_step": 1e3 * (end - began) / steps,
        "steps": steps,
        "tokens_per_row": tokens / steps / batch,
        "position": (before + tokens / 2) / batch,
        "drafted_per_row": drafted / steps / batch,
        "accepted": accepted,
    }


def measure_tree(args: argparse.Namespace, root: Path, form: str) -> dict[int, dict[str, float]]:
    """The rows of all batches with drafts of one form."""
    width, nodes = map(int, form.split("x"))
    loop, _ = make_loop(args, root, drafts=True, tree=(width, nodes))
    return {batch: measure(loop, args, batch, 0.1, args.seconds) for batch in args.batches}


def release(args: argparse.Namespace) -> None:
    """Free the memory of an engine that nothing refers to."""
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()


def rate_without(rows: list[dict[str, float]], position: float) -> float:
    """Output tokens per second without drafts at a mean output length."""
    (at, rate), (later, rate_later) = ((row["position"], row["tokens_per_second"]) for row in rows)
    seconds = 1 / rate + (position - at) / (later - at) * (1 / rate_later - 1 / rate)
    return 1 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--trees", nargs="*", default=[], metavar="TOPKxTOKENS", help="forms of trees")
    parser.add_argument("--lengths", type=float, nargs="*", default=[1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 3], help="fixed draft lengths beside adaptive ones")
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--room", type=int, default=4000, help="most output tokens of a request")
    parser.add_argument("--graphs", type=int, default=256, help="largest batch of a CUDA graph, in tokens")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a measurement; of an adaptive one three times as long")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no batch is begun")
    parser.add_argument("--profile", action="store_true", help="print the kernels' times at the greatest length or of the first tree")
    parser.add_argument("--apart", action="store_true", help="each row reads its keys alone, in one draft too (share_prefixes: false)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model instead of Llama-3.1-8B's shape")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, found = time.perf_counter(), []

    def note(row: dict[str, Any]) -> None:
        found.append(row)
        print(f"{time.perf_counter() - began:6.1f} s {json.dumps(row)}", flush=True)
        if args.out:
            args.out.write_text(json.dumps({"settings": {**vars(args), "out": None}, "results": found}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        if args.profile and args.trees:
            width, nodes = map(int, args.trees[0].split("x"))
            loop, _ = make_loop(args, Path(folder), drafts=True, tree=(width, nodes))
            for batch in args.batches:
                profile(loop, args, batch)
            return
        if args.profile:
            loop, drafter = make_loop(args, Path(folder), drafts=True)
            assert drafter is not None
            loop.runner.inputs.planner.choose_accepted = SyntheticAcceptance(args.lengths[-1], NUM_STEPS).choose  # type: ignore[attr-defined]
            loop.scheduler.speculation.enable(drafter, NUM_STEPS)
            for batch in args.batches:
                profile(loop, args, batch)
            return
        loop, _ = make_loop(args, Path(folder), drafts=False)
        times = (0.1, 5 * args.seconds)
        off = {batch: [measure(loop, args, batch, each, args.seconds) for each in times] for batch in args.batches}
        for batch, rows in off.items():
            for row in rows:
                note({"batch": batch, "mode": "off", **row})
        del loop
        release(args)
        for form in [f"1x{NUM_STEPS}", *args.trees] if args.trees else []:
            for batch, row in measure_tree(args, Path(folder), form).items():
                ratio = row["tokens_per_second"] / rate_without(off[batch], row["position"])
                note({"batch": batch, "mode": f"tree {form}", "break_even": row["tokens_per_row"] / ratio, **row})
            release(args)
        if not args.lengths:
            return
        loop, drafter = make_loop(args, Path(folder), drafts=True)
        assert drafter is not None
        for batch in args.batches:
            for length in args.lengths:
                if time.perf_counter() - began > args.budget:
                    continue
                loop.runner.inputs.planner.choose_accepted = SyntheticAcceptance(length, NUM_STEPS).choose  # type: ignore[attr-defined]
                for steps in (*args.fixed, None):
                    loop.scheduler.speculation.enable(drafter, steps or NUM_STEPS, is_adaptive=steps is None)
                    row = measure(loop, args, batch, *((0.1, args.seconds) if steps else (4 * args.seconds, 3 * args.seconds)))
                    ratio = row["tokens_per_second"] / rate_without(off[batch], row["position"])
                    note({"batch": batch, "mode": steps or "adaptive", "length": length, "ratio": ratio, **row})


if __name__ == "__main__":
    main()
