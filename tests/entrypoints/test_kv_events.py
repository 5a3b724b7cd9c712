"""A server with `--kv-events-config`: what a subscriber gets, also after a crash of the engine, and
which settings are refused."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from click.testing import CliRunner

from frame.core.errors import ConfigError
from frame.entrypoints.cli.main import cli
from frame.entrypoints.configuration.sources import from_keywords, load_config
from tests.entrypoints.serving import RunningServer, free_port

ON = {"enable_kv_cache_events": True, "publisher": "zmq"}


def receive(socket: zmq.Socket) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the batch, event) until 20 s without any."""
    while socket.poll(20_000):
        topic, number, payload = socket.recv_multipart()
        assert topic == b"kv-events"
        yield from ((int.from_bytes(number, "big"), event) for event in msgspec.msgpack.decode(payload)[1])


def subscribe() -> tuple[zmq.Context, zmq.Socket, zmq.Socket, str]:
    """A context, its socket that gets all events, one that tells when it is connected, and the
    setting of the server that sends them."""
    endpoint, context = f"tcp://127.0.0.1:{free_port()}", zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, "")
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(endpoint)
    return context, socket, monitor, json.dumps(ON | {"endpoint": endpoint, "topic": "kv-events"})


@pytest.mark.slow
def test_a_subscriber_follows_a_server(checkpoint: Path) -> None:
    context, socket, monitor, given = subscribe()
    prompt = list(range(20, 90))
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    with RunningServer(checkpoint, "--kv-events-config", given, "--page-size", "16", "--max-total-tokens", "4096") as running:
        assert monitor.poll(20_000)
        events = receive(socket)
        reply = running.post("/generate", body).json()
        _, stored = next(each for each in events if each[1]["type"] == "BlockStored")
        assert stored["parent_block_hash"] is None and stored["block_size"] == 16 and stored["lora_id"] is None
        assert stored["token_ids"] == prompt[: len(stored["token_ids"])]
        hashes = list(stored["block_hashes"])
        while len(hashes) < 4:  # a prompt may be cached in chunks
            _, more = next(events)
            assert more["parent_block_hash"] == hashes[-1]
            hashes += more["block_hashes"]
        assert reply["meta_info"]["completion_tokens"] == 4
        running.post("/flush_cache", {})
        assert next(event for _, event in events if event["type"] == "BlockRemoved")["block_hashes"]
        assert next(events)[1] == {"type": "AllBlocksCleared"}
        os.kill(running.children()["scheduler"].pid, signal.SIGKILL)
        assert running.post("/generate", body).status_code == 200
        for other in range(200, 260):  # ZMQ connects again meanwhile
            running.post("/generate", body | {"input_ids": [*prompt[:48], *[other] * 20]})
            if socket.poll(500):
                break
        number, again = next(each for each in events if each[1]["type"] == "BlockStored" and each[1]["token_ids"][0] >= 200)
        assert number < 64 and again["parent_block_hash"] == hashes[2]  # numbers begin again; hashes are those of all servers
    context.destroy(linger=0)


@pytest.mark.slow
def test_a_subscriber_follows_the_tiers(checkpoint: Path) -> None:
    """Blocks are in memory of the host too, and stay when the device evicts them."""
    context, socket, monitor, given = subscribe()
    tier = ("--cache-tiers", "host", "--set", "plugins.options.kv_tier/host.size_gib=0.01")
    flags = ("--page-size", "16", "--max-total-tokens", "512", *tier)
    known: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
    with RunningServer(checkpoint, "--kv-events-config", given, *flags, fake=False) as running:
        assert monitor.poll(20_000)
        for first in range(2, 10):
            prompt = [first] * 8 + list(range(20, 140))
            running.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}).raise_for_status()
        deadline = time.monotonic() + 60
        while not known["CPU"] - known["GPU"] or len(known["CPU"]) < 40:
            assert time.monotonic() < deadline, known
            if not socket.poll(1000):
                continue
            for event in msgspec.msgpack.decode(socket.recv_multipart()[2])[1]:
                if event["type"] == "BlockStored":
                    assert event["block_size"] * len(event["block_hashes"]) == len(event["token_ids"])
                    known[event["medium"]] |= set(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    assert set(event["block_hashes"]) <= known[event["medium"]]
                    known[event["medium"]] -= set(event["block_hashes"])
        running.post("/flush_cache", {}).raise_for_status()
        while known["CPU"]:
            assert socket.poll(20_000)
            for event in msgspec.msgpack.decode(socket.recv_multipart()[2])[1]:
                known["CPU"] -= set(event.get("block_hashes", ())) if event.get("medium") == "CPU" else set()
    context.destroy(linger=0)


def load(**flags: Any) -> Any:
    return load_config(flags={name.replace("_", "-"): value for name, value in flags.items()}, environ={}).config.cache


def test_what_the_object_of_vllm_stands_for() -> None:
    assert load().events_endpoint is None
    assert load(kv_events_config=json.dumps(ON)).events_endpoint == "tcp://*:5557"
    assert load(kv_events_config='{"enable_kv_cache_events": false, "endpoint": "tcp://*:1"}').events_endpoint is None
    assert load(kv_events_config=json.dumps(ON | {"publisher": "null"})).events_endpoint is None
    every = {"endpoint": "tcp://a:1", "replay_endpoint": "tcp://*:2", "topic": "t", "buffer_steps": 3, "hwm": 4, "max_queue_size": 5}
    for cache in (load(kv_events_config=json.dumps(ON | every)), from_keywords({}, kv_events_config=ON | every).config.cache):
        assert {name: getattr(cache, f"events_{name}") for name in every} == every


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_events_config": "tcp://*:5557"}, "is 'tcp://.*it should be a JSON object"),
        ({"kv_events_config": "[1]"}, "it should be a JSON object"),
        ({"kv_events_config": '{"endpoints": "x"}'}, "unknown key 'endpoints'; did you mean 'endpoint'"),
        ({"kv_events_config": '{"enable_kv_cache_events": "yes"}'}, "should be true or false"),
        ({"kv_events_config": json.dumps(ON | {"endpoint": "udp://x"})}, r"cache.events_endpoint is 'udp://x'; it should be tcp://\*:PORT"),
        ({"kv_events_config": json.dumps(ON | {"hwm": 0})}, "cache.events_hwm is 0; it should be greater than or equal to 1"),
        ({"kv_events_config": json.dumps(ON), "cache_events_topic": "t"}, "and flag --cache-events-topic contradict each other"),
        ({"cache_events_endpoint": "tcp://*:0"}, "cache.events_endpoint is 'tcp://"),
        ({"cache_events_endpoint": "ipc://relative"}, "ipc://PATH"),
    ],
)
def test_what_is_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(**flags)


def test_help_names_the_flag() -> None:
    assert "--kv-events-config" in CliRunner().invoke(cli, ["serve", "--help", "cache"]).output
