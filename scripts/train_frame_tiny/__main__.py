"""Trains frame-tiny from scratch and evaluates it: `python -m scripts.train_frame_tiny --minutes
7.6`.

Steps: collect the corpus, train the tokenizer (unless the directory has one), pack, train, export,
evaluate. The corpus and its manifest are cached under `.cache/frame_tiny`. Training needs one GPU;
a CPU is too slow.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from frame.entrypoints.tools.eval.evaluate import evaluate
from frame.entrypoints.tools.eval.tasks import TASKS, make_example
from scripts.train_frame_tiny import corpus
from scripts.train_frame_tiny import tokenizer as tk
from scripts.train_frame_tiny.checkpoint_backend import CheckpointBackend
from scripts.train_frame_tiny.export import load_model, save_model
from scripts.train_frame_tiny.model import FrameTiny, Shape
from scripts.train_frame_tiny.samples import pack_texts
from scripts.train_frame_tiny.train import CodeRows, Recipe, Trainer

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = Recipe(minutes=7.6)


def report(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_frame_tiny", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "frame/models/frame_tiny", help="directory of the model")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache/frame_tiny", help="directory of the packed corpus")
    parser.add_argument("--minutes", type=float, default=7.6, help="training time without compilation; 0 only evaluates")
    parser.add_argument("--rows", type=int, default=DEFAULTS.rows, help="rows of a batch")
    parser.add_argument("--workers", type=int, default=DEFAULTS.workers, help="processes that generate conversations")
    parser.add_argument("--package-bytes", type=int, default=8_000_000, help="maximum number of bytes from one package")
    parser.add_argument("--corpus-bytes", type=int, default=130_000_000, help="maximum number of bytes of the corpus")
    parser.add_argument("--long-share", type=float, default=DEFAULTS.long_share, help="share of the time on rows of 8,192 tokens")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of both peak learning rates")
    parser.add_argument("--resume", type=Path, help="directory of the initial weights")
    parser.add_argument("--new-tokenizer", action="store_true", help="train the tokenizer again")
    parser.add_argument("--samples", type=int, default=200, help="evaluation examples per task; 0 skips the evaluation")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def tokenizer_texts(texts: list[str], seed: int) -> Iterator[str]:
    """The tokenizer's training text: about 20 MB of source code and 1.5 MB of task text."""
    size = 0
    for text in random.Random(seed).sample(texts, len(texts)):
        size += len(text)
        if size > 20_000_000:
            break
        yield text
    for index in range(1500):
        for task in TASKS:
            example = make_example(task, seed, index, "train")
            yield "\n".join([example.prompt, *(message["content"] for message in example.messages), example.expected])


def packed_corpus(options: argparse.Namespace) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Tokenizer and packed corpus, from the cache where it has them."""
    cache: Path = options.cache
    fresh = options.new_tokenizer or not (options.out / "tokenizer.json").exists()
    if (cache / "stream.npy").exists() and not fresh:
        return tk.load_tokenizer(options.out), np.load(cache / "stream.npy").astype(np.int32), np.load(cache / "starts.npy")
    texts, sources = corpus.collect(options.package_bytes, options.corpus_bytes)
    report(f"corpus: {len(texts)} files, {sum(map(len, texts)) / 1e6:.1f} MB from {len(sources)} packages")
    if fresh:
        tk.save_tokenizer(tk.train_tokenizer(tokenizer_texts(texts, options.seed)), options.out, Shape().positions)
    tokenizer = tk.load_tokenizer(options.out)
    stream, starts = pack_texts(texts, tokenizer, options.seed)
    cache.mkdir(parents=True, exist_ok=True)
    np.save(cache / "stream.npy", stream.astype(np.uint16))
    np.save(cache / "starts.npy", starts)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "corpus_manifest.json").write_text(json.dumps(corpus.manifest(sources), indent=1) + "\n")
    report(f"packed: {len(stream) / 1e6:.1f} M tokens of code")
    return tokenizer, stream, starts


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Corpus, tokenizer, training, export."""
    begun = time.monotonic()
    tokenizer, stream, starts = packed_corpus(options)
    model = (load_model(options.resume) if options.resume else FrameTiny(Shape())).to(device)
    report(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters; ready after {time.monotonic() - begun:.0f} s")
    recipe = Recipe(
        minutes=options.minutes,
        rows=options.rows,
        workers=options.workers,
        long_share=options.long_share,
        muon_rate=DEFAULTS.muon_rate * options.rate,
        adam_rate=DEFAULTS.adam_rate * options.rate,
        seed=options.seed,
    )

    def save(trained: FrameTiny) -> None:
        report(f"saved {save_model(trained, options.out)} bytes to {options.out}")

    Trainer(model, CodeRows(stream, starts, device), tokenizer, recipe, report).run(save)


def score(options: argparse.Namespace, device: torch.device) -> None:
    """Evaluate the exported weights and print the table and some failures."""
    backend = CheckpointBackend(load_model(options.out).to(device), tk.load_tokenizer(options.out))
    result = asyncio.run(evaluate(backend, samples=options.samples, seed=options.seed, concurrency=10_000))
    report(result.table())
    for failure in result.failures()[:12]:
        question = failure.example.messages[-1]["content"] if failure.example.messages else failure.example.prompt
        report(f"{failure.example.task}: {question!r:.160} -> {failure.answer!r:.80}, not {failure.example.expected!r:.80}")


def main() -> None:
    """Run the steps that the options select."""
    options = arguments()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.minutes > 0:
        train(options, device)
    if options.samples:
        score(options, device)


if __name__ == "__main__":
    main()
