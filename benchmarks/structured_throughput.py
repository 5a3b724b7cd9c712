"""What constrained output costs an engine: `python benchmarks/structured_throughput.py [--config
FOLDER]` prints one JSON object.

Output tokens a second of the offline engine, 32 requests, free and constrained, at temperature 1,
every output of the same length. The model is dense and its weights are random, so that a step costs
the same whatever tokens it is given: a free run and a constrained one compute different tokens, and
differ by what the grammar costs alone. (With experts they would not; with a trained model a grammar
that it does not follow leads to other text.) A round is a run of each kind, one after the other; a
loss is against the free run of the same round, and the median of the rounds is given, beside that
of each one's least disturbed round by CPU time. The first round, in which nothing of a grammar is
known but that it is one, stands for itself; grammars are compiled before, as they are off the
engine's loop.

Without `--config` the model has the sizes of frame-tiny, with its tokenizer; with the folder of a
`config.json` it has that model's, with a made tokenizer of as many tokens. No grammar can end
before the output does. In the row `blanks` both runs prefer whitespace by `logit_bias`, which is
the worst that a model can do with a schema. `--steps` tells where the host's time goes, in a run
for itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from made_tokenizer import MadeTokenizer, RankedTokenizer
from structured_output import PERSON

from frame import Engine, SamplingParams
from frame.checkpoint.model_config import EMBEDDED, find_model

PROMPT = 64  # tokens
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 1,
}  # fmt: skip
NEVER = "#" * 4096  # what would have to come before a text may end
REGEX = r"([A-Z][a-z]+ [0-9]+(\.[0-9]{2})? (EUR|USD|GBP)[;.] ?)*" + NEVER
COUNTED = "([a-z]{1,50} ){4000}"
EBNF = f'root ::= expr ";" root | "{NEVER}"\n' + 'expr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")" | [a-z]+'


class RandomSchemas:
    """Objects as clients ask for them, the same for the same seed; their arrays never end."""

    def __init__(self, seed: int) -> None:
        self._numbers = random.Random(seed)

    def __call__(self) -> dict[str, Any]:
        return {"type": "array", "minItems": 1000, "items": self._object(2)}

    def _object(self, depth: int) -> dict[str, Any]:
        words = ("id", "name", "status", "created_at", "total", "items", "email", "note", "country", "is_active")
        names = self._numbers.sample(words, self._numbers.randint(2, 6))
        required = [name for name in names if self._numbers.random() < 0.8]
        return {"type": "object", "properties": {name: self._value(depth) for name in names}, "required": required}

    def _value(self, depth: int) -> dict[str, Any]:
        if depth and self._numbers.random() < 0.3:
            inner = self._object(depth - 1)
            return inner if self._numbers.random() < 0.5 else {"type": "array", "items": inner, "maxItems": 4}
        leaves: tuple[dict[str, Any], ...] = (
            {"type": "string", "maxLength": self._numbers.choice((20, 80, 200))},
            {"type": "string"},
            {"type": "integer", "minimum": 0, "maximum": self._numbers.choice((9, 120, 100_000))},
            {"type": "number"},
            {"type": "boolean"},
            {"enum": ["open", "closed", "pending", "in review"]},
            {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            {"anyOf": [{"type": "string", "maxLength": 30}, {"type": "null"}]},
        )
        return self._numbers.choice(leaves)


def kinds(tokenizer: Any, count: int) -> dict[str, list[dict[str, Any]]]:
    """What each request asks for, by the name of the run; `free` and `free blanks` are what the
    others are compared with."""
    pieces = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}
    blanks = dict.fromkeys([i for i, text in pieces.items() if text and not text.strip(" \n\t\r") and len(text) <= 4][:200], 12.0)
    made = RandomSchemas(0)
    person = json.dumps({"type": "array", "minItems": 1000, "items": PERSON})
    return {
        "free": [{}] * count,
        "regex": [{"regex": REGEX}] * count,
        "counted": [{"regex": COUNTED}] * count,
        "schema": [{"json_schema": person}] * count,
        "schemas": [{"json_schema": json.dumps(made())} for _ in range(count)],
        "ebnf": [{"ebnf": EBNF}] * count,
        "free blanks": [{"logit_bias": blanks}] * count,
        "blanks": [{"json_schema": person, "logit_bias": blanks}] * count,
    }


@contextmanager
def model_folder(config: Path | None, ranks: Path | None) -> Iterator[tuple[str, Any]]:
    """A folder with a configuration and a tokenizer; -> its path, the tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if config is None:
            (folder / "config.json").write_text(json.dumps(TINY))
            for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                shutil.copy(Path(find_model(EMBEDDED)) / file, folder)
            from tokenizers import Tokenizer

            yield name, Tokenizer.from_file(str(folder / "tokenizer.json"))
            return
        model_config = json.loads((config / "config.json").read_text())
        size = model_config["vocab_size"]
        made = MadeTokenizer(size) if ranks is None else RankedTokenizer(ranks, size)
        end = made.eos_token_ids[0]
        (folder / "config.json").write_text(json.dumps({**model_config, "eos_token_id": end}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": made.backend.id_to_token(end)}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        made.backend.save(str(folder / "tokenizer.json"))
        yield name, made.backend


class Runs:
    """Runs of one engine, none of which finds anything of another's prompts in the cache."""

    def __init__(self, engine: Engine, length: int, vocab_size: int, temperature: float) -> None:
        self._engine = engine
        self._temperature = temperature
        self.length = length
        self._numbers = random.Random(0)
        self._maximum = vocab_size - 10
        self.steps = self.jumped = 0  # of the last run

    def compile(self, asked: list[dict[str, Any]]) -> None:
        self._engine.generate([[5, 6]] * len(asked), [SamplingParams(max_tokens=1, **each) for each in asked])

    def __call__(self, asked: list[dict[str, Any]]) -> tuple[float, float]:
        """-> output tokens a second, and a second of the process's CPU time."""
        prompts = [[self._numbers.randint(5, self._maximum) for _ in range(PROMPT)] for _ in asked]
        common = {"max_tokens": self.length, "temperature": self._temperature, "ignore_eos": True}
        params = [SamplingParams(**common, seed=self._numbers.randint(0, 1 << 30), **each) for each in asked]
        before = self._engine.control("server_info")
        began, busy = time.perf_counter(), time.process_time()
        outputs = self._engine.generate(prompts, params)
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        tokens = sum(len(output.token_ids) for output in outputs)
        after = self._engine.control("server_info")
        self.steps, self.jumped = (after[key] - before[key] for key in ("step", "jumped_tokens"))
        if tokens != len(asked) * self.length:
            raise RuntimeError(f"{tokens} tokens came of {len(asked) * self.length}: {[o.error for o in outputs if o.error][:1]}")
        return tokens / seconds, tokens / busy


def throughput(run: Runs, asked: dict[str, list[dict[str, Any]]], rounds: int) -> dict[str, Any]:
    """Figures by kind; `rounds` after the first, which is told apart."""
    figures: dict[str, list[tuple[float, float]]] = {label: [] for label in asked}
    for requests in asked.values():
        run.compile(requests)
    run(asked["free"])
    run(asked["free"])
    gc.collect()
    gc.freeze()  # as a server's engine does when it is ready
    for _ in range(rounds + 1):
        for label, requests in asked.items():
            figures[label].append(run(requests))
    found = {}
    for label, values in figures.items():
        base = figures["free blanks" if label.endswith("blanks") else "free"]
        wall, busy = ([1 - mine[i] / its[i] for mine, its in zip(values, base, strict=True)] for i in (0, 1))
        found[label] = {
            "tokens_per_second": round(statistics.median(value[0] for value in values[1:]), 1),
            "loss_percent": round(100 * statistics.median(wall[1:]), 1),
            "cpu_us_per_token": round(statistics.median(1e6 / value[1] for value in values[1:]), 1),
            "cpu_loss_percent": round(100 * statistics.median(busy[1:]), 1),
            "least_cpu_loss_percent": round(100 * (1 - max(value[1] for value in values[1:]) / max(value[1] for value in base[1:])), 1),
            "first_loss_percent": round(100 * wall[0], 1),
            "all": [(round(one, 1), round(two, 1)) for one, two in values],
        }
    return found


@contextmanager
def stopwatches(spent: dict[str, float]) -> Iterator[None]:
    """Add up what the parts of the engine's loop take, seconds of the clock. `wait` is the device's
    time that nothing else hides."""
    from frame.core.execution.async_output import DoneStep, MaskedStep, QueuedStep
    from frame.core.execution.model_runner import TorchModelRunner
    from frame.core.scheduling.scheduler import Scheduler

    parts = [
        (Scheduler, "schedule_batch"), (TorchModelRunner, "launch"), (Scheduler, "fill_deferred_mask"), (MaskedStep, "sample"),
        (QueuedStep, "wait"), (DoneStep, "wait"), (Scheduler, "commit"),
    ]  # fmt: skip
    before: list[tuple[Any, str, Callable[..., Any]]] = [(owner, name, getattr(owner, name)) for owner, name in parts]

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[label] += time.perf_counter() - began

        return call

    for owner, name, function in before:
        setattr(owner, name, timed(name, function))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def step_times(run: Runs, asked: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Microseconds a step of each part of the loop, and what is left of the clock beside them."""
    found = {}
    for label, requests in asked.items():
        spent: dict[str, float] = defaultdict(float)
        with stopwatches(spent):
            tokens_per_second, _ = run(requests)
        step = run.length * len(requests) / tokens_per_second / run.steps * 1e6
        parts = {name: round(seconds / run.steps * 1e6, 1) for name, seconds in spent.items()}
        found[label] = {
            "steps": run.steps,
            "jumped": run.jumped,
            "step": round(step, 1),
            **parts,
            "other": round(step - sum(parts.values()), 1),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="folder of a config.json")
    parser.add_argument("--ranks", type=Path, help="with --config: a file of tokens in tiktoken's format instead of a made vocabulary")
    parser.add_argument("--backend", default="combined")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--running", type=int, help="most requests that the engine is made for; as many as there are")
    parser.add_argument("--length", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: texts repeat themselves, as trained models' do in part")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="kinds beside the free ones")
    parser.add_argument("--steps", action="store_true", help="tell where the host's time goes, too")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of the engine")
    options = parser.parse_args()
    settings = {key: json.loads(value) for key, value in (each.split("=", 1) for each in options.set)}
    with model_folder(options.config, options.ranks) as (folder, tokenizer):
        asked = kinds(tokenizer, options.requests)
        if options.only:
            asked = {label: each for label, each in asked.items() if label in options.only or label.startswith("free")}
        with Engine(
            folder, load_format="dummy", grammar_backend=options.backend, sampling_grammar_workers=0,
            max_running_requests=options.running or options.requests, max_model_len=1024, **settings,
        ) as engine:  # fmt: skip
            run = Runs(engine, options.length, tokenizer.get_vocab_size(), options.temperature)
            rows = throughput(run, asked, options.rounds)
            steps = step_times(run, asked) if options.steps else {}
            info = {key: engine.info[key] for key in ("device", "dtype") if key in engine.info}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_after": os.getloadavg()[0], **info}
    what = {"config": None if options.config is None else options.config.name, "backend": options.backend, "requests": options.requests}
    what["temperature"] = options.temperature
    print(
        json.dumps({**what, "length": options.length, "settings": settings, "machine": machine, "rows": rows, "step_us": steps}, indent=1)
    )


if __name__ == "__main__":
    main()
