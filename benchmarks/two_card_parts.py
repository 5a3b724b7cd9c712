"""The parts of two_cards.py: what each one runs, and the shapes of its models."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

HERE = Path(__file__).parent
TOKENS = {"return_token_ids": True}  # otherwise tokens without text make no event
SECRET = {"FRAME_DIST_KEY": "0123456789abcdef0123456789abcdef"}  # of servers of this run, on this host
REPLICAS, DIVIDED = (30601, 30602, 30600), (30611, 30612, 30610)  # ports: two servers and their router
ALL_WORKLOADS, EXPERT_WORKLOADS = "single,batch8,prefill,mixed256", "single,prefill,mixed256"


class Bench:
    """One part: runs programs, and tells what it found. known: rows of earlier parts."""

    def __init__(self, arguments: argparse.Namespace, known: Mapping[str, Any], folder: Path) -> None:
        self.arguments, self.known, self.folder = arguments, dict(known), folder
        self.deadline = time.monotonic() + arguments.part_seconds
        self.on_gpu = arguments.device != "cpu"

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def tell(self, name: str, found: Any) -> None:
        self.known[name] = found
        print(json.dumps({"found": name, "value": found}), flush=True)

    def model(self, name: str) -> Path:
        """The folder of a model's shape."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(shape(name, self.arguments.tiny)))
        return folder

    def run(self, *words: Any, card: int | None = None, check: bool = True) -> str:
        """The output of a script of this folder, or of a module (`-m NAME`)."""
        script = [] if words[0] == "-m" else [str(HERE / str(words[0]))]
        command = [sys.executable, *script, *map(str, words[len(script) :])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=self.environment(card), cwd=HERE.parent)
        if check and done.returncode != 0:
            raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stdout[-300:]}")
        return done.stdout

    def environment(self, card: int | None = None) -> dict[str, str]:
        chosen = {} if card is None or not self.on_gpu else {"CUDA_VISIBLE_DEVICES": str(card)}
        return {**os.environ, **SECRET, **chosen, **({} if self.on_gpu else {"OMP_NUM_THREADS": "1"})}

    def rates(self, name: str, model: str, only: str, card: int | None = None, **settings: Any) -> None:
        """The reference workloads on one engine, unless an earlier part has them."""
        if name in self.known:
            return
        out, keys = self.folder / f"{name}.json", settings
        flags = ["--only", only, "--ceilings", "h200", "--repeats", 2, "--json", out]
        if self.arguments.tiny:
            keys = {"device": self.arguments.device, "max_total_tokens": 8192, "max_model_len": 1024, **settings}
            flags += ["--shrink", 64, "--max-len", 0]
        for key, value in keys.items():
            flags += ["--set", f"{key}={json.dumps(value)}"]
        self.run("h200_table.py", self.model(model), *flags, "--budget", max(10.0, self.left - 15), card=card)
        (row,) = json.loads(out.read_text())["rows"].values()
        engine = row.pop("engine", {})
        self.tell(name, {**row, "settings": settings, "max_total_tokens": engine.get("max_total_tokens"), "plugins": engine.get("plugins")})
        if row["ended"] != "done":
            raise RuntimeError(f"{name}: {row['ended']}")

    def baselines(self) -> None:
        """One card: both models at once where both are asked for, each on a card of its own."""
        wanted = set(self.arguments.parts.split(","))
        jobs: list[Callable[[], None]] = []
        if wanted & {"tp", "pp", "deterministic"}:
            jobs.append(lambda: self.rates("llama tp1", "llama", ALL_WORKLOADS, 0))
        if wanted & {"tp-moe", "ep"}:
            jobs.append(lambda: self.rates("qwen3-moe tp1", "qwen3-moe", EXPERT_WORKLOADS, 1))
        side_by_side(jobs)

    @contextmanager
    def serve(self, model: Path, port: int, *flags: str, card: int | None = None) -> Iterator[Any]:
        """A server in a process of its own; not ready yet."""
        import media

        flags = flags if self.on_gpu else (*flags, "--device", "cpu", "--threads", "1")
        server = media.Server(model, port, *flags, env=self.environment(card))
        try:
            yield server
        finally:
            end(server.process)

    @contextmanager
    def route(self, port: int, *flags: str) -> Iterator[None]:
        """A router that answers."""
        command = [sys.executable, "-m", "frame", "router", "--port", str(port), *flags]
        process = subprocess.Popen(command, env=self.environment(), stdout=sys.stderr)
        try:
            wait(f"http://127.0.0.1:{port}/health")
            yield
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and its children."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in family[:1]:
        each.terminate()
    psutil.wait_procs(family, timeout=5)
    for each in family:
        if each.is_running():
            each.kill()
    process.wait()


def side_by_side(jobs: Sequence[Callable[[], None]]) -> None:
    """All at once, each in a thread; the first error is raised once all have ended."""
    errors: list[Exception] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]


def shape(name: str, tiny: bool) -> dict[str, Any]:
    """config.json of a model. Those of `--tiny` have two narrow layers."""
    from deterministic import LLAMA, QWEN3_MOE, TINY

    from frame.entrypoints.tools.plan.planner import PUBLISHED

    if name == "deepseek":
        found: dict[str, Any] = json.loads((PUBLISHED / "DeepSeek-V3.1/config.json").read_text())
        return found | (NARROW_DEEPSEEK if tiny else {"num_hidden_layers": count_layers()})
    if name == "float32":
        wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
        return TINY if tiny else TINY | wide | {"vocab_size": 4096, "num_hidden_layers": 4}
    if name == "llama":
        return TINY if tiny else LLAMA
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return (
        QWEN3_MOE | TINY | {key: QWEN3_MOE[key] for key in ("architectures", "model_type")} | experts
        if tiny
        else QWEN3_MOE | {"num_hidden_layers": 48}
    )


NARROW_DEEPSEEK = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 1024, "quantization_config": None,
}  # fmt: skip


def count_layers() -> int:
    """DeepSeek's layers that two cards hold: 16 of 141 GB, 12 of 80 GB."""
    import torch

    return 16 if torch.cuda.get_device_properties(0).total_memory > 100e9 else 12


# ---- parts ---------------------------------------------------------------------------------------


def tp(bench: Bench) -> None:
    bench.baselines()
    bench.rates("llama tp2", "llama", ALL_WORKLOADS, tp=2)


def tp_moe(bench: Bench) -> None:
    bench.baselines()
    bench.rates("qwen3-moe tp2", "qwen3-moe", EXPERT_WORKLOADS, tp=2)


def ep(bench: Bench) -> None:
    bench.rates("qwen3-moe tp2", "qwen3-moe", EXPERT_WORKLOADS, tp=2)
    bench.rates("qwen3-moe ep2", "qwen3-moe", "prefill,mixed256", tp=2, ep=2)
    moves = {"enable_eplb": True, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 10 if bench.arguments.tiny else 200}
    bench.rates("qwen3-moe ep2 eplb", "qwen3-moe", "mixed256", tp=2, ep=2, **moves)


def pp(bench: Bench) -> None:
    bench.baselines()
    bench.rates("llama pp2", "llama", "mixed256", pp=2)


def deterministic(bench: Bench) -> None:
    bench.rates("llama tp2", "llama", ALL_WORKLOADS, tp=2)
    bench.rates("llama tp2 deterministic", "llama", "single,mixed256", tp=2, enable_deterministic_inference=True)
    bench.tell(
        "deterministic tp2 texts", json.loads(bench.run("two_cards.py", "--texts", bench.model("llama"), *device(bench)).splitlines()[-1])
    )


def device(bench: Bench) -> list[str]:
    return ["--device", bench.arguments.device, *(["--tiny"] if bench.arguments.tiny else [])]


def print_texts(arguments: argparse.Namespace) -> None:
    """Greedy tokens of 8 prompts alone, and beside 56 others, of two ranks in the batch-invariant
    mode."""
    from frame import Engine, SamplingParams

    prompts = [[10 + (31 * row + 7 * place * (row + 1)) % 490 for place in range(8 + 5 * row)] for row in range(64)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    keys = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "max_total_tokens": 65_536, "tp": 2}
    keys |= {"enable_deterministic_inference": True, "device": arguments.device}
    with Engine(model=arguments.texts, **keys) as engine:
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts[:8]]
        engine.flush_cache()
        together = [output.token_ids for output in engine.generate(prompts, params)]
    print(json.dumps({"equal": sum(a == b for a, b in zip(alone, together, strict=False)), "of": len(alone)}))


def deepseek(bench: Bench) -> None:
    bench.rates("deepseek tp2", "deepseek", EXPERT_WORKLOADS, tp=2)
    bench.rates("deepseek ep2 groups", "deepseek", "mixed256", tp=2, ep=2, dp=2, enable_dp_attention=True)


def lora(bench: Bench) -> None:
    """Rates with adapters beside those without, on one card and on two."""
    small = bench.arguments.tiny
    sizes = (
        ["--batches", 2, "--long", 64, "--rounds", 1, "--adapters", 2, "--dtype", "float32"]
        if small
        else ["--batches", 1, 8, 64, "--rounds", 1, "--adapters", 8]
    )
    tokens = {"device": "cpu", "max_total_tokens": 8192, "max_model_len": 1024} if small else {"max_model_len": 16_384}

    def measure(ranks: int, card: int | None) -> None:
        out = bench.folder / f"lora-{ranks}.json"
        settings = json.dumps({**tokens, "tp": ranks})
        bench.run("lora.py", "--model", bench.model("llama"), "--settings", settings, *sizes, "--out", out, card=card)
        bench.tell(f"lora tp{ranks}", json.loads(out.read_text()))

    measure(2, None)
    measure(1, 0)


def media(bench: Bench) -> None:
    """Requests a second with large images that all differ, one output token each."""
    from media import LARGE, SMALL, make_body, make_image, make_text

    from frame.testing.modality.folders import write_folder

    folder, small = bench.folder / "qwen3-vl", bench.arguments.tiny
    write_folder(folder, "qwen3_vl")
    (folder / "chat_template.jinja").write_text(CHAT)
    config = json.loads((folder / "config.json").read_text())
    if small:
        config["vision_config"] |= NARROW_VISION
        (folder / "config.json").write_text(json.dumps(config))
    else:
        config |= {"torch_dtype": "bfloat16", "vision_config": config["vision_config"] | VISION}
        config["text_config"] |= TEXT
        (folder / "config.json").write_text(json.dumps(config))
        pixels = json.loads((folder / "preprocessor_config.json").read_text())
        pixels["size"] = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
        (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    tokens = (
        ("--max-total-tokens", "8192", "--max-model-len", "2048") if small else ("--max-total-tokens", "131072", "--max-model-len", "8192")
    )

    def measure(ranks: int, port: int, card: int | None) -> None:
        with bench.serve(folder, port, *tokens, "--tp", str(ranks), card=card) as server:
            server.wait()
            rates = []
            for _ in range(3):  # the first one compiles
                bodies = [make_body(make_text(16), make_image(SMALL if small else LARGE)) for _ in range(4 if small else 48)]
                rates.append(asyncio.run(server.run(bodies, 32))[0])
            bench.tell(f"media tp{ranks}", {"requests_per_s": max(rates[1:]), "all": rates})

    measure(1, 30621, 0)
    measure(2, 30622, None)


CHAT = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)
VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096, "temporal_patch_size": 2,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24], "model_type": "qwen3_vl", "in_channels": 3,
}  # fmt: skip
NARROW_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0],
}  # fmt: skip
TEXT = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6},
}  # fmt: skip


def updates(bench: Bench) -> None:
    """A trainer on the second card, the server on the first; then a trainer in host memory for a
    server on both."""
    common = ["--model", bench.model("llama"), "--updates", 3, *(["--device", "cpu"] if not bench.on_gpu else [])]
    ways = ["group-cuda", "ipc-cpu"] if bench.on_gpu else ["group-cpu", "ipc-cpu"]
    out = bench.run("weight_updates.py", *common, "--server-card", 0, "--ways", *ways)
    bench.tell("updates one card", json.loads(out.splitlines()[-1]))
    out = bench.run("weight_updates.py", *common, "--tp", 2, "--ways", "group-cpu")
    bench.tell("updates tp2", json.loads(out.splitlines()[-1]))


def sleep(bench: Bench) -> None:
    common = ["--model", bench.model("llama"), "--updates", 0, "--ways", "ipc-cpu", *(["--device", "cpu"] if not bench.on_gpu else [])]
    bench.tell("sleep tp2", json.loads(bench.run("weight_updates.py", *common, "--tp", 2, "--sleep").splitlines()[-1]))


def pd(bench: Bench) -> None:
    """A prefill and a decode server beside two replicas, all started at once, loaded in turn."""
    small, shape_folder = bench.arguments.tiny, bench.model("llama")
    flags = ["--skip-tokenizer-init", "--max-total-tokens", "8192" if small else "131072", "--max-model-len", "1024" if small else "16384"]
    if bench.on_gpu:
        flags += ["--mem-fraction-static", "0.45"]  # two servers a card
    tier = ["--set", f"plugins.options.kv_tier/nixl.size_gib={0.25 if small else 8}", "--disaggregation-port", "30619"]
    tier += ["--min-load-tokens", "8"] if small else []
    with ExitStack() as stack:

        def serve(port: int, card: int, *more: str) -> Any:
            return stack.enter_context(bench.serve(shape_folder, port, *flags, *more, card=card))

        servers = [serve(REPLICAS[0], 0), serve(REPLICAS[1], 1)]
        servers += [
            serve(DIVIDED[0], 0, *tier, "--disaggregation-mode", "prefill"),
            serve(DIVIDED[1], 1, *tier, "--disaggregation-mode", "decode"),
        ]
        for each in servers:
            each.wait()
        urls = [each.url for each in servers]
        for port, names in (
            (REPLICAS[2], ("--replica", urls[0], "--replica", urls[1])),
            (DIVIDED[2], ("--prefill", urls[2], "--decode", urls[3])),
        ):
            stack.enter_context(bench.route(port, *names))
        both = {"pd replicas": REPLICAS[2], "pd divided": DIVIDED[2]}
        for port in both.values():  # compiles
            load(port, 16, bench, 0)
        measure_transfer(bench, urls[3])
        for number, rate in enumerate((8.0,) if small else (16.0, 32.0)):
            for name, port in both.items():
                bench.tell(f"{name} at {rate:g}/s", load(port, rate, bench, 2 * number + 1))
            pages = {"prefill": urls[2], "decode": urls[3], "router": f"http://127.0.0.1:{DIVIDED[2]}"}
            counters = {name: read_counters(httpx.get(f"{url}/metrics").text) for name, url in pages.items()}
            bench.tell(f"pd counters after {rate:g}/s", counters)


def read_counters(metrics: str) -> dict[str, float]:
    """What a page of metrics says of tiers, transfers and divided requests: whether prompts were
    transferred, or computed by the decode server."""
    begins = "frame_kv_t", "frame_kv_l", "frame_router_prefills"
    lines = (line.rpartition(" ") for line in metrics.splitlines() if line.startswith(begins))
    return {name: float(value) for name, _, value in lines}


def wait(url: str) -> None:
    for _ in range(300):
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{url} does not answer")


def load(port: int, rate: float, bench: Bench, seed: int) -> dict[str, Any]:
    """TTFT and ITL percentiles of Poisson arrivals."""
    from frame.entrypoints.tools.bench.load import Target, run
    from frame.entrypoints.tools.bench.summary import row
    from frame.entrypoints.tools.bench.workload import Arrivals, Shape

    small = bench.arguments.tiny
    one = Shape(8, (32, 96), (8, 16)) if small else Shape(int(10 * rate), (512, 1536), (96, 288))
    return row(
        asyncio.run(run(Target(f"http://127.0.0.1:{port}", "m", extra=TOKENS), one.jobs(500 if small else 10_000, seed, Arrivals(rate))))
    )


def measure_transfer(bench: Bench, decode: str) -> None:
    """Bytes of a prompt over the time between its first two tokens, less that of short prompts."""
    from frame.entrypoints.tools.bench.load import Target, run
    from frame.entrypoints.tools.bench.workload import Shape

    def transferred() -> float:
        lines = httpx.get(f"{decode}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("frame_kv_transfer_bytes_total"))

    def gap(length: int, seed: int) -> float:
        target, one = Target(f"http://127.0.0.1:{DIVIDED[2]}", "m", extra=TOKENS), Shape(1, (length, length), (32, 32))
        (timing,) = asyncio.run(run(target, one.jobs(500, seed)))
        if len(timing.events) < 2:
            raise RuntimeError(f"a prompt of {length} tokens: {timing.error or 'one event'}")
        return timing.events[1] - timing.events[0]

    size, rows = 256 if bench.arguments.tiny else 8192, []
    for number in range(5):
        before = transferred()
        seconds = gap(size, 100 + number)
        rows.append({"bytes": transferred() - before, "seconds": seconds, "short_seconds": gap(4, 200 + number)})
    found = {
        "rows": rows,
        "bytes_per_s": statistics.median(row["bytes"] / max(1e-6, row["seconds"] - row["short_seconds"]) for row in rows),
    }
    if bench.on_gpu:
        from gpu_clock import time_copy

        found["copy_bytes_per_s"] = (1 << 30) / time_copy(1 << 30)
    bench.tell("pd transfer", found)


def kills(bench: Bench) -> None:
    """Greedy texts in float32 while one rank and then the other is killed."""
    out = bench.folder / "kills.json"
    settings = [
        "model.dtype=float32",
        "cache.max_total_tokens=16384" if bench.arguments.tiny else "cache.max_total_tokens=131072",
        f"execution.device={bench.arguments.device}",
    ]
    full = ["--kill-after", 0.3, "--new-tokens", 4096, "--up-seconds", 16]
    small = ["--shrink", 64, "--kill-after", 0.1] if bench.arguments.tiny else full
    always = [word for setting in settings for word in ("--always", setting)]
    place = ["--config", bench.model("float32"), "--home", bench.folder / "home", "--json", out]
    bench.run("deepseek_full.py", "--part", 2, "--tp", 2, *place, *small, *always, "--budget", bench.left + 15)
    for name, row in json.loads(out.read_text())["rows"].items():
        bench.tell(f"kills: {name}", row)


def tests(bench: Bench) -> None:
    """The GPU tests that need two cards: counts of all, failed and skipped ones."""
    out = bench.folder / "tests.xml"
    places = ["tests/gpu/test_tensor_parallel.py", "tests/gpu/test_weight_transfers.py", "tests/gpu/test_hardware.py"]
    bench.run("-m", "pytest", *places, "-m", "gpu or not gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={out}", check=False)
    suite = xml.parse(out).getroot().find("testsuite")
    assert suite is not None
    bench.tell("tests", {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})


PARTS: Mapping[str, Callable[[Bench], None]] = {
    "tp": tp, "tp-moe": tp_moe, "ep": ep, "pd": pd, "pp": pp, "deterministic": deterministic, "updates": updates, "sleep": sleep,
    "lora": lora, "media": media, "deepseek": deepseek, "kills": kills, "tests": tests,
}  # fmt: skip
