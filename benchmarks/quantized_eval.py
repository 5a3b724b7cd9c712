"""The cost in quality of each quantization method: `frame eval` of frame-tiny against bfloat16, its
recall at about 3,000 tokens, and the drift of logits over 16k tokens of a random Llama. Writes
JSON.

The methods quantize while loading, read checkpoints that this script writes (round-to-nearest in
the layouts of AutoGPTQ and AutoAWQ), quantize the KV cache, or read other copies of frame-tiny,
such as those of `frame quantize`. Every method answers the same questions.

    python benchmarks/quantized_eval.py --out benchmarks/results/quantized-eval.json
    python benchmarks/quantized_eval.py --methods int4 --checkpoint gptq=/tmp/frame-tiny-gptq
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.entrypoints.cli.eval import EngineBackend
from frame.entrypoints.offline.engine import Engine
from frame.entrypoints.tools.eval.evaluate import evaluate
from frame.entrypoints.tools.eval.tasks import TASKS, askable_keys, recall_list, recall_pairs, recall_question
from frame.forward.declared_caches import model_geometry
from frame.testing.checkpoints import make_checkpoint
from tests.models.harness import open_session

GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # outputs of the nibbles of a word, lowest first
METHODS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "gptq": {},
    "awq": {},
    "kv fp8": {"kv_cache_dtype": "fp8"},
    "kv int8": {"kv_cache_dtype": "int8"},
    "fp8, kv fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
LENGTH = 3000  # tokens of a long recall question


def write_words(quantized: torch.Tensor) -> torch.Tensor:
    """4-bit quantized values [n, m] -> int32 [n, m / 8], the lowest nibble first."""
    words = quantized.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return (words.sum(2).bitwise_xor(1 << 31) - (1 << 31)).to(torch.int32)


def write_gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Symmetric round-to-nearest, zero point 8, stored less 1."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7.5).clamp_min(1e-8).half()
    quantized = ((groups / scales.float()[..., None]).round().clamp(-8, 7) + 8).flatten(1)
    return {
        "qweight": write_words(quantized).t().contiguous(),
        "qzeros": write_words(torch.full((scales.shape[1], len(weight)), 7)),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }


def write_awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round-to-nearest with zero points."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = ((high - low) / 15).clamp_min(1e-8).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    quantized = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15).flatten(1)
    words = [write_words(part.t().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)) for part in (quantized, zeros)]
    return {"qweight": words[0], "qzeros": words[1], "scales": scales.t().contiguous()}


WRITERS = {
    "gptq": (write_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (write_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
}


def write_checkpoint(method: str, folder: Path) -> Path:
    """A copy of frame-tiny whose projections are quantized."""
    write, config = WRITERS[method]
    shutil.copytree(find_model(EMBEDDED), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and "_proj" in name:
            del tensors[name]
            tensors |= {name.removesuffix("weight") + key: tensor for key, tensor in write(weight).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return folder


def make_long_questions(count: int) -> list[tuple[list[dict[str, str]], str]]:
    """Recall questions of about `LENGTH` tokens, and their answers."""
    found = []
    while len(found) < count:
        draw = random.Random(f"long recall {len(found)}")
        pairs = recall_pairs(draw, LENGTH - 60)
        key = draw.choice(askable_keys(pairs, "eval"))
        text = f"{recall_list(draw, pairs)}\n{recall_question(draw, key)}"
        found.append(([{"role": "user", "content": text}], pairs[key]))
    return found


@contextmanager
def open_engine(method: str, checkpoints: dict[str, Path], threads: int) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints.get(method)
        if path is None and method in WRITERS:
            path = write_checkpoint(method, Path(folder) / method)
        keys = {"device": "cpu", "dtype": "bfloat16", "threads": threads, "max_total_tokens": 32 * 1024, **METHODS.get(method, {})}
        with Engine(str(path) if path else None, **keys) as engine:
            yield engine


def measure(method: str, args: argparse.Namespace, checkpoints: dict[str, Path]) -> dict[str, Any]:
    """Percentages by task, their mean, and long recall."""
    with open_engine(method, checkpoints, args.threads) as engine:
        report = asyncio.run(evaluate(EngineBackend(engine), TASKS, args.samples, seed=1))
        questions = make_long_questions(args.samples)
        answers: Any = engine.generate([question for question, _ in questions], {"max_tokens": 24, "temperature": 0.0})
    right = sum(output.text.strip() == wanted for output, (_, wanted) in zip(answers, questions, strict=True))
    rates = {score.name: 100 * score.rate for score in report.tasks}
    found = {"method": method, **rates, "mean": sum(rates.values()) / len(rates), "recall_3000": 100 * right / len(questions)}
    found["prompt_tokens"] = sum(output.prompt_tokens for output in answers) / len(questions)
    return found


def measure_drift(length: int) -> list[dict[str, Any]]:
    """The difference of logits from those without quantization, relative to their norm, of a random
    Llama in float32: the median and the 99th percentile of each quarter of the positions."""
    tokens = torch.randint(6, 384, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint("LlamaForCausalLM", Path(name) / "llama", max_position_embeddings=length)
        want: torch.Tensor | None = None
        for weights, cache in (("none", "float32"), ("fp8", "float32"), ("int8", "float32"), ("int4", "float32"),
                               ("none", "fp8_e4m3"), ("none", "int8")):  # fmt: skip
            names = {"attention": "torch_native", "page_size": 16, "max_tokens": length, "max_context": length}
            session = open_session(folder, quantization=weights, **names)
            geometry = model_geometry(session.model, kv_geometry(session.model_config, 1, 16, cache))  # type: ignore[arg-type]
            session.pool = KVPool(geometry, session.slots * -(-length // 16) + 1, torch.device("cpu"))  # type: ignore[assignment]
            got = torch.cat([session.step([(0, tokens[start : start + 2048])])[0] for start in range(0, length, 2048)]).float()
            if want is None:
                want = got
                continue
            errors = ((got - want).norm(dim=-1) / want.norm(dim=-1)).chunk(4)
            medians = [100 * float(part.median()) for part in errors]
            worst = [100 * float(part.quantile(0.99)) for part in errors]
            rows.append({"weights": weights, "kv": cache, "median_percent": medians, "p99_percent": worst})
            print(f"drift of {weights:5} weights, {cache:8} cache:", *(f"{value:6.2f}" for value in (*medians, *worst)), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=FOLDER", help="A quantized copy of frame-tiny.")
    parser.add_argument("--samples", type=int, default=200, help="Questions per task.")
    parser.add_argument("--drift-tokens", type=int, default=16384, help="0: no drift.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    checkpoints = {name: Path(folder) for name, _, folder in (each.partition("=") for each in args.checkpoint)}
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys(["bf16", *args.methods, *checkpoints]):
        rows.append(row := measure(method, args, checkpoints))
        row["lost"], row["lost_recall_3000"] = (rows[0][key] - row[key] for key in ("mean", "recall_3000"))
        shown = " ".join(f"{key} {row[key]:.1f}" for key in (*TASKS, "mean", "recall_3000", "lost"))
        print(f"{method:12} {shown}", flush=True)
    result = {"samples": args.samples, "torch": torch.__version__, "methods": rows}
    if args.drift_tokens:
        result["drift_tokens"], result["drift"] = args.drift_tokens, measure_drift(args.drift_tokens)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
