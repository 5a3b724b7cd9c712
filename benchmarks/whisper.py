"""Speed of Whisper-large-v3's shape with random weights, decodes with and without CUDA graphs.
Windows have random features of 30 seconds; prompts have four tokens. Scheduler and runner share one
thread, without text and transport. Writes JSON.

python benchmarks/whisper.py --out whisper.json
python benchmarks/whisper.py --tiny --device cpu --batches 2 --tokens 20
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop

SHAPE = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "is_encoder_decoder": True, "torch_dtype": "float16",
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20, "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "vocab_size": 51866, "num_mel_bins": 128, "max_source_positions": 1500,
    "max_target_positions": 448, "decoder_start_token_id": 50258, "bos_token_id": 50257, "eos_token_id": 50257, "pad_token_id": 50256,
    "activation_function": "gelu", "scale_embedding": False,
}  # fmt: skip
TINY = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "torch_dtype": "float32"}  # fmt: skip
PROMPT = [50258, 50259, 50360, 50364]


def make_loop(args: argparse.Namespace, folder: Path, maximum: int) -> LocalLoop:
    """`maximum`: rows of the largest decode graph."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | (TINY if args.tiny else {})))
    config: dict[str, Any] = {
        "model": {"path": str(folder), "load_format": "dummy", "skip_tokenizer_init": True},
        "cache": {"max_total_tokens": 448 * (max(args.batches) + 1)},
        "scheduler": {"max_running_requests": max(args.batches)},
        "attention": {"backend": args.attention},
        "execution": {"device": args.device, "cuda_graph_max_bs": maximum},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


def measure(loop: LocalLoop, windows: list[bytes], tokens: int) -> dict[str, float]:
    """`window_ms`: until a window's first token, in a batch of all. `tokens_per_second`: of all
    windows after their first ones."""
    times = []
    for count in (2, 1, 1 + tokens):  # the first run warms up
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        loop.generate([PROMPT] * len(windows), params, windows)
        times.append(time.perf_counter() - began)
    _, first, whole = times
    return {"window_ms": 1e3 * first / len(windows), "tokens_per_second": len(windows) * tokens / (whole - first)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=200, help="of a window")
    parser.add_argument("--attention", help="a backend's name; by default the one that is chosen")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model instead of Whisper-large-v3's shape")
    parser.add_argument("--out", type=Path)
    args, found = parser.parse_args(), []
    noise = np.random.default_rng(1)
    windows = [noise.standard_normal((SHAPE["num_mel_bins"], 3000), np.float32).tobytes() for _ in range(max(args.batches))]
    with tempfile.TemporaryDirectory() as root:
        for maximum in (0,) if args.device == "cpu" else (max(args.batches), 0):
            loop = make_loop(args, Path(root) / str(maximum), maximum)
            for batch in args.batches:
                row = {"graphs": maximum, "batch": batch, **measure(loop, windows[:batch], args.tokens)}
                found.append({name: round(value, 2) for name, value in row.items()})
                print(json.dumps(found[-1]), flush=True)
            loop.runner.close()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
