"""How much of the prompts replicas have in their caches, and the times of requests, where the
router reads KV events, estimates, or looks at no prefix.

`simulate`: 64 engines on a virtual clock, with frame's scheduler, prefix cache, event builder and
routing policy, and steps as long as those of Llama-3.1-8B on one H200. `servers`: three servers of
the embedded model on this machine's CPU behind `frame router`, in turn with and without events. In
both, prompts begin with one of many documents that together do not fit into the caches.

    python benchmarks/router_events.py simulate --json benchmarks/results/router_events.json
    python benchmarks/router_events.py servers --json benchmarks/results/router_events_servers.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
import numpy as np
from router_hot_prefix import find_ports, wait_ready

from frame.config.schema import FrameConfig
from frame.core.interfaces.cache_groups import RESERVED_PAGES
from frame.entrypoints.router.cached_prefixes import MAX_PREFIXES, CachedPrefixes, PromptPrefixes
from frame.entrypoints.router.requests import read_prompt
from frame.entrypoints.tools.simulate.engine import VirtualEngine
from frame.entrypoints.tools.simulate.fleet import Fleet
from frame.entrypoints.tools.simulate.measures import Measures
from frame.entrypoints.tools.simulate.simulation import Simulation, parse_cluster
from frame.entrypoints.tools.simulate.step_times import StepTimes
from frame.entrypoints.tools.simulate.workload import Arrival
from frame.interfaces.routing import RoutingContext, RoutingPolicy, RoutingRequest
from frame.kv_events.cache_events import _ROOT, EventBuilder, Stored
from frame.kv_events.prompt_blocks import tell_blocks
from frame.kv_events.publisher import EventBatch
from frame.kv_events.subscriber import CacheIndex
from frame.plugins.routing_policies import prefix_load
from frame.plugins.routing_policies.prefix_load import MAX_PREFIXES as FEW_PREFIXES
from frame.plugins.routing_policies.prefix_load import PrefixLoad
from frame.plugins.routing_policies.round_robin import RoundRobin

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001}  # fmt: skip
DELAY = 0.1  # seconds until the router has an event
ANSWER = 0.3  # seconds until it has the head of an answer
WORDS = [("etaoinshrdlu" * 3)[number % 12 :][: 1 + number * 7 % 9] for number in range(512)]  # of 1 to 9 letters


@dataclass
class Cache:
    """What the router knows of one replica's cache; stands for a `Subscription`."""

    page_size: int
    pages: int
    is_live: bool = True

    def __post_init__(self) -> None:
        self.index, self.waiting = CacheIndex(), deque[tuple[float, bytes]]()
        self.builder, self.owned, self.number, self.now = EventBuilder(self.pages, self.page_size), set[int](), 0, 0.0

    @property
    def indexes(self) -> list[dict[int, int]]:
        return [self.index.blocks]

    def read_until(self, now: float) -> None:
        self.now = now
        while self.waiting and self.waiting[0][0] <= now:
            self.index.apply(self.number, self.waiting.popleft()[1], 1 << 20)
            self.number += 1

    def _put(self, events: Iterator[Any]) -> None:
        if batch := list(events):
            self.waiting.append((self.clock() + DELAY, msgspec.msgpack.encode(EventBatch(0.0, batch))))

    def record_inserted(self, keys: np.ndarray, pages: np.ndarray, namespace: str, num_cached: int) -> None:
        size = self.page_size
        first, end = num_cached // size, len(keys) // size
        if first < end:
            parent = _ROOT if not first else int(pages[first - 1])
            keys = np.array(keys[first * size : end * size], np.int32)
            self._put(self.builder.store(Stored(keys, pages[first:end].copy(), parent, namespace)))

    def record_removed(self, pages: np.ndarray) -> None:
        self._put(self.builder.remove(pages))

    def record_cleared(self) -> None:
        self._put(self.builder.clear())


@dataclass
class Routers:
    """Routers that share no state: each request comes to one of them at random."""

    kind: str
    count: int

    def __post_init__(self) -> None:
        self.now, self.random = 0.0, random.Random(5)
        make: type[RoutingPolicy] = RoundRobin if self.kind == "round_robin" else PrefixLoad
        self.policies = [make(RoutingContext()) for _ in range(self.count)]
        self.prefixes = [CachedPrefixes(None, lambda: self.now) for _ in range(self.count)]  # type: ignore[arg-type]
        self.loads: list[dict[int, int]] = [{} for _ in range(self.count)]  # each knows its own requests alone


class RoutedFleet(Fleet):
    """A fleet whose routers read text, and events."""

    def __init__(self, simulation: Simulation, measures: Measures, replicas: int, pages: int, routers: Routers) -> None:
        self.routers, self.caches = routers, dict[int, Cache]()
        self.running: dict[int, deque[tuple[int, PromptPrefixes]]] = {}
        self.answers: deque[tuple[float, int, PromptPrefixes, list[int]]] = deque()
        resolved = simulation.plan.resolved
        self.page_size = resolved.page_size
        times = StepTimes(simulation.plan, simulation.shares)

        def make() -> VirtualEngine:
            engine = VirtualEngine(resolved, simulation.registry, pages + RESERVED_PAGES, times, measures)
            (manager,) = engine.scheduler.list_kv_managers()
            cache = self.caches[len(self.caches)] = Cache(manager.page_size, manager.num_token_pages)
            cache.clock = lambda: engine._now  # type: ignore[attr-defined] # noqa: SLF001
            manager.events = cache  # type: ignore[assignment]
            return engine

        super().__init__(make, replicas, None)
        for number in self.caches:
            self.running[number] = deque()
        for loads in routers.loads:
            loads.update(dict.fromkeys(self.caches, 0))

    def _finish(self, replica: int) -> None:
        super()._finish(replica)
        router, prefixes = self.running[replica].popleft()  # about in order
        self.routers.loads[router][replica] -= 1
        prefixes.owner.leave(prefixes, str(replica))

    def _send(self, arrival: Arrival) -> None:
        routers = self.routers
        routers.now = arrival.at
        while self.answers and self.answers[0][0] <= arrival.at:
            _, router, prefixes, prompt = self.answers.popleft()
            routers.prefixes[router].learn(prefixes, tell_blocks(prompt, "", self.page_size))
        router = routers.random.randrange(routers.count)
        known = routers.prefixes[router]
        text = " ".join(WORDS[token % 512] for token in arrival.prompt)
        prompt = read_prompt(json.dumps({"model": "m", "prompt": text}).encode())
        prefixes = known.read(prompt, [])
        request = RoutingRequest(prompt.blocks)
        if routers.kind == "events":
            for cache in self.caches.values():
                cache.read_until(arrival.at)
            cached = known.find_shares(prefixes, {number: (str(number), cache) for number, cache in self.caches.items()})
            request = RoutingRequest(prompt.blocks, "", cached)
        replica = routers.policies[router].choose_replica(request, routers.loads[router])
        if request.cached.get(replica, 0.0) < 1.0:
            self.answers.append((arrival.at + ANSWER, router, prefixes, arrival.prompt))
        known.enter(prefixes, str(replica))
        routers.loads[router][replica] += 1
        self.running[replica].append((router, prefixes))
        self.loads[replica] += 1
        self._numbers += 1
        if self._engines[replica].add_request(arrival, self._numbers):
            self._push(replica)


def draw(options: argparse.Namespace, documents: int, seed: int) -> Iterator[Arrival]:
    """Requests that begin with documents, the first of which are asked for most (Zipf)."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(10, 128000, options.document) for _ in range(documents)]
    weights = 1 / np.arange(1, documents + 1) ** options.skew
    chosen = rng.choice(documents, options.requests, p=weights / weights.sum())
    at = np.cumsum(rng.exponential(1 / options.rate, options.requests))
    for when, head in zip(at.tolist(), chosen.tolist(), strict=True):
        yield Arrival(when, [*heads[head].tolist(), *rng.integers(10, 128000, 64).tolist()], options.tokens)


def write(options: argparse.Namespace, page_size: int, rows: list[dict[str, Any]]) -> None:
    report = {"options": {name: value for name, value in vars(options).items() if name != "json"}, "page_size": page_size, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def simulate(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        config = FrameConfig.model_validate({"model": {"path": folder, "skip_tokenizer_init": True}})
        simulation = Simulation.build(config, parse_cluster(f"{options.replicas}x1xh200"))
        size = simulation.plan.resolved.page_size
        rows = []
        for documents in options.documents:
            for routers in options.routers:
                for kind in ("events", "estimate", "estimate_with_memory", "round_robin"):
                    if kind == "round_robin" and routers > 1:
                        continue
                    prefix_load.MAX_PREFIXES = MAX_PREFIXES if kind == "estimate_with_memory" else FEW_PREFIXES
                    began, measures = time.perf_counter(), Measures(simulation.shares.entry)
                    fleet = RoutedFleet(simulation, measures, options.replicas, options.cache // size, Routers(kind, routers))
                    fleet.run(draw(options, documents, 0))
                    figures = measures.describe(options.replicas)
                    share = documents * options.document / (options.replicas * options.cache)
                    row = {"kind": kind, "routers": routers, "documents": documents, "documents_over_caches": round(share, 2),
                           "hit_rate": round(measures._cached_tokens / measures.prompt_tokens, 4),  # noqa: SLF001
                           "seconds": round(time.perf_counter() - began, 1), "figures": figures}  # fmt: skip
                    rows.append(row)
                    write(options, size, rows)
                    print(json.dumps(row | {"figures": figures["first_token_ms"]}), flush=True)


async def ask_all(ports: list[int], prompts: list[str], together: int) -> dict[str, float]:
    """The share of the prompts' tokens that were cached, and seconds to the answer."""
    gate, found, times = asyncio.Semaphore(together), [0, 0], list[float]()
    async with httpx.AsyncClient(timeout=120) as client:

        async def ask(number: int, prompt: str) -> None:
            body = {"model": "frame", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
            async with gate:
                began = time.perf_counter()
                answer = await client.post(f"http://127.0.0.1:{ports[number % len(ports)]}/v1/completions", json=body)
                times.append(time.perf_counter() - began)
            usage = answer.raise_for_status().json()["usage"]
            found[0] += usage["prompt_tokens_details"]["cached_tokens"]
            found[1] += usage["prompt_tokens"]

        await asyncio.gather(*(ask(*each) for each in enumerate(prompts)))
    return {"hit_rate": round(found[0] / found[1], 4), "median_s": round(median(times), 4), "prompt_tokens": found[1]}


def serve(options: argparse.Namespace, kind: str, routers: int, prompts: list[str]) -> dict[str, float]:
    """One round, with new servers."""
    ports = find_ports(9 + routers)
    servers, doors = ports[:3], ports[9:]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FRAME_FLEET_KEY": "the key of this benchmark"}
    replicas = [part for port in servers for part in ("--replica", f"http://127.0.0.1:{port}")]
    commands = [
        [sys.executable, "-m", "frame", "serve", "--port", str(port), "--served-model-name", "frame", "--page-size", "16",
         "--max-model-len", "4096", "--max-total-tokens", str(options.server_cache),
         *(["--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{ports[3 + number]}",
                                              "replay_endpoint": f"tcp://127.0.0.1:{ports[6 + number]}"})] if kind == "events" else [])]
        for number, port in enumerate(servers)
    ] + [[sys.executable, "-m", "frame", "router", "--port", str(port), *replicas] for port in doors]  # fmt: skip
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for command in commands]
    try:
        for port in (*servers, *doors):
            asyncio.run(wait_ready(port))
        time.sleep(5)  # each router has checked all servers
        asyncio.run(ask_all(doors, prompts[: len(prompts) // 3], options.together))  # fills the caches
        return asyncio.run(ask_all(doors, prompts[len(prompts) // 3 :], options.together))
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait(30)


def run_servers(options: argparse.Namespace) -> None:
    chooser = random.Random(3)
    documents = [" ".join(f"{chooser.choice(WORDS)} {number}" for _ in range(options.words)) for number in range(options.server_documents)]
    weights = [1 / (number + 1) ** options.skew for number in range(len(documents))]
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        chosen = random.Random(number).choices(documents, weights, k=options.server_requests)
        prompts = [f"{document} {place}" for place, document in enumerate(chosen)]
        for routers in options.routers:
            for kind in ("events", "estimate")[:: -1 if number % 2 else 1]:
                row = {"kind": kind, "routers": routers, "round": number, "load": os.getloadavg()[0]}
                row |= serve(options, kind, routers, prompts)
                rows.append(row)
                print(json.dumps(row), flush=True)
                write(options, 16, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulate", "servers"])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--documents", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--document", type=int, default=2048, help="tokens")
    parser.add_argument("--cache", type=int, default=32768, help="tokens of a replica's cache")
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--rate", type=float, default=400.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--skew", type=float, default=0.8)
    parser.add_argument("--server-cache", type=int, default=4096, help="tokens of a server's cache")
    parser.add_argument("--server-documents", type=int, default=40)
    parser.add_argument("--words", type=int, default=80, help="of a server's document")
    parser.add_argument("--server-requests", type=int, default=210)
    parser.add_argument("--together", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    (simulate if given.what == "simulate" else run_servers)(given)
