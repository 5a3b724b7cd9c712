"""Images in chats: rates of requests over HTTP beside those of texts; prints one JSON object.

    python benchmarks/media.py --model .gpu/models/qwen3-vl-8b

`--model`: a folder with the configuration, tokenizer and processors of a model that reads images;
its weights are random. All rows come from one run, in rounds in turn; rates are requests a second,
and the median of the rounds. `pauses`: the longest times without a response, in seconds.

text, text_only: the same texts, to this server and to one with `--language-model-only`.
repeated, plain: one image after texts that differ, and texts of as many tokens.
small, large: images of 640 x 360 and 1,920 x 1,080 that all differ, with one output token; `bound`
is the rate at which their operations, of encoder and prompt, would run at `--flops`.
gaps: milliseconds between tokens of 32 streams, beside arrivals of large images and of texts of as
many tokens at the same rate; the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

SMALL, LARGE = (640, 360), (1920, 1080)
_numbers = random.Random(3)
_seeds = count(1)


def make_image(size: tuple[int, int]) -> str:
    """A JPEG of its own, as a data URL."""
    pixels = np.random.default_rng(next(_seeds)).integers(0, 255, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    stored = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(stored, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(stored.getvalue()).decode()


def make_text(length: int) -> str:
    return "".join(_numbers.choice("abcdefgh ijklmnop") for _ in range(length))


def make_body(text: str, image: str | None = None, tokens: int = 1, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        parts.append({"type": "image_url", "image_url": {"url": image}})
    fields |= {"messages": [{"role": "user", "content": parts}], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"model": "m", **fields}


class Server:
    def __init__(self, model: Path, port: int, *flags: str, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "frame", "serve", "--model", str(model), "--load-format", "dummy", "--port", str(port)]
        self.process = subprocess.Popen([*command, "--served-model-name", "m", *flags], env=env)
        self.url = f"http://127.0.0.1:{port}"

    def wait(self) -> None:
        while self.process.poll() is None:
            try:
                if httpx.get(self.url + "/health/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise SystemExit("the server did not start")

    async def send(self, http: httpx.AsyncClient, body: bytes) -> dict[str, Any]:
        reply = await http.post(self.url + "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        if reply.status_code != 200:
            raise SystemExit(reply.text)
        answer: dict[str, Any] = reply.json()
        return answer

    async def run(self, bodies: list[dict[str, Any]], at_once: int) -> tuple[float, int, float]:
        """Requests a second, the last one's prompt tokens, the longest time without a response."""
        waiting = iter([json.dumps(body).encode() for body in bodies])  # written before the time begins
        places, used, ends = min(at_once, len(bodies)), 0, list[float]()

        async def work(http: httpx.AsyncClient) -> None:
            nonlocal used
            for body in waiting:
                used = (await self.send(http, body))["usage"]["prompt_tokens"]
                ends.append(time.perf_counter())

        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=places)) as http:
            ends.append(start := time.perf_counter())
            await asyncio.gather(*(work(http) for _ in range(places)))
        return len(bodies) / (ends[-1] - start), used, max(after - before for before, after in pairwise(ends))

    async def flush(self) -> None:
        """Forget cached prefixes."""
        async with httpx.AsyncClient(timeout=60) as http:
            (await http.post(self.url + "/flush_cache")).raise_for_status()

    async def stream(self, http: httpx.AsyncClient, gaps: list[float]) -> None:
        params = {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True}
        body = {"text": make_text(64), "sampling_params": params, "stream": True}  # an event a token, also of one without text
        async with http.stream("POST", self.url + "/generate", json=body) as reply:
            last = 0.0
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last:
                        gaps.append(1e3 * (now - last))
                    last = now

    async def find_gaps(self, make: Callable[[], dict[str, Any]] | None, rate: float, seconds: float) -> dict[str, float]:
        """Of 32 streams, while requests arrive."""
        gaps: list[float] = []
        bodies = [json.dumps(make()).encode() for _ in range(int(rate * seconds))] if make else []
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=512)) as http:
            streams = [asyncio.create_task(self.stream(http, gaps)) for _ in range(32)]
            await asyncio.sleep(0.5)
            gaps.clear()
            sent = []
            for body in bodies:
                sent.append(asyncio.create_task(self.send(http, body)))
                await asyncio.sleep(1 / rate)
            found = list(gaps) if bodies else []
            await asyncio.gather(*streams, *sent)
        found = found or gaps
        return {"p50": statistics.median(found), "p99": float(np.percentile(found, 99)), "gaps": len(found)}


def bound(model: Path, size: tuple[int, int], tokens: int, flops: float) -> float:
    """Images a second by the operations of encoder and prompt."""
    config = json.loads((model / "config.json").read_text())
    tower, text = config["vision_config"], config["text_config"]
    side = tower["patch_size"] * tower["spatial_merge_size"]
    patches = round(size[0] / side) * round(size[1] / side) * tower["spatial_merge_size"] ** 2
    hidden, merged = tower["hidden_size"], tower["hidden_size"] * tower["spatial_merge_size"] ** 2
    encoder = tower["depth"] * (patches * 2 * (4 * hidden**2 + 2 * hidden * tower["intermediate_size"]) + 4 * patches**2 * hidden)
    mergers = 1 + len(tower["deepstack_visual_indexes"])
    encoder += mergers * patches // tower["spatial_merge_size"] ** 2 * 2 * (merged**2 + merged * tower["out_hidden_size"])
    heads = (2 * text["num_attention_heads"] + 2 * text["num_key_value_heads"]) * text["head_dim"] * text["hidden_size"]
    layer = 2 * (heads + 3 * text["hidden_size"] * text["intermediate_size"])
    prompt = text["num_hidden_layers"] * (tokens * layer + 2 * tokens**2 * text["num_attention_heads"] * text["head_dim"])
    return float(flops / (encoder + prompt))


async def measure(server: Server, text_only: Server | None, arguments: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {"text": [], "text_only": [], "repeated": [], "plain": [], "small": [], "large": []}
    pauses: dict[str, list[float]] = {name: [] for name in rows}
    one, images = make_image(SMALL), arguments.images
    _, with_image, _ = await server.run([make_body(make_text(64), one)], 1)
    _, without, _ = await server.run([make_body(make_text(64))], 1)
    _, twice, _ = await server.run([make_body(make_text(2048))], 1)
    letters = (2048 - 64) / (twice - without)  # of a token
    same = 64 + round((with_image - without) * letters)
    prompt_tokens = {}
    for size in (SMALL, LARGE):  # compiles, and fills the pools
        await server.run([make_body(make_text(64), make_image(size)) for _ in range(16)], 16)
    for each in (server, *filter(None, [text_only])):
        await each.run([make_body(make_text(same), tokens=64) for _ in range(128)], 128)
    for _ in range(0 if text_only is None else arguments.rounds):
        texts = [make_body(make_text(600), tokens=64) for _ in range(256)]
        assert text_only is not None
        for name, each in (("text", server), ("text_only", text_only)):
            await each.flush()
            rate, _, pause = await each.run(texts, 128)
            rows[name].append(rate)
            pauses[name].append(pause)
        repeated = [make_body(make_text(64), one) for _ in range(2 * images)]
        plain = [make_body(make_text(same)) for _ in range(2 * images)]
        for name, bodies in (("repeated", repeated), ("plain", plain)):
            rate, prompt_tokens[name], pause = await server.run(bodies, 64)
            rows[name].append(rate)
            pauses[name].append(pause)
        for name, size in (("small", SMALL), ("large", LARGE)):
            bodies = [make_body(make_text(16), make_image(size)) for _ in range(images if size == SMALL else images // 2)]
            rate, prompt_tokens[name], pause = await server.run(bodies, 64)
            rows[name].append(rate)
            pauses[name].append(pause)
    if arguments.only_gaps:
        _, prompt_tokens["large"], _ = await server.run([make_body(make_text(16), make_image(LARGE))], 1)
    report: dict[str, Any] = {
        name: {"median": statistics.median(all_rates), "all": all_rates, "pauses": pauses[name], "prompt_tokens": prompt_tokens.get(name)}
        for name, all_rates in rows.items()
        if all_rates
    }
    for name, size in (("small", SMALL), ("large", LARGE)) if report else ():
        report[name]["bound"] = bound(arguments.model, size, prompt_tokens[name], arguments.flops)
        report[name]["share"] = report[name]["median"] / report[name]["bound"]
    longest = round(64 + (prompt_tokens["large"] - without) * letters)
    rate = arguments.arrivals
    kinds = {
        "alone": (None, 0.0),
        "texts": (lambda: make_body(make_text(longest)), 3.0),
        "images": (lambda: make_body(make_text(16), make_image(LARGE)), 3.0),
    }
    repeats = range(arguments.rounds)
    rounds = [{name: await server.find_gaps(make, rate, seconds) for name, (make, seconds) in kinds.items()} for _ in repeats]
    report["gaps"] = {name: {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]} for name in kinds}
    report["gap_rounds"] = rounds
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-gaps", action="store_true", help="measure the gaps alone")
    parser.add_argument("--images", type=int, default=256, help="of a round")
    parser.add_argument("--arrivals", type=float, default=8.0, help="requests a second beside streams")
    parser.add_argument("--flops", type=float, default=790e12, help="operations a second of large products on the card")
    arguments = parser.parse_args()
    flags = ("--max-total-tokens", "131072", "--max-model-len", "8192", "--max-running-requests", "256")
    servers = [Server(arguments.model, 30561, *flags)]
    if not arguments.only_gaps:
        servers.append(Server(arguments.model, 30562, "--language-model-only", *flags))
    try:
        for each in servers:
            each.wait()
        report = asyncio.run(measure(servers[0], servers[1] if len(servers) > 1 else None, arguments))
    finally:
        for each in servers:
            each.process.terminate()
            each.process.wait()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({"arguments": {**vars(arguments), "model": arguments.model.name}, "card": card, **report}))


if __name__ == "__main__":
    main()
