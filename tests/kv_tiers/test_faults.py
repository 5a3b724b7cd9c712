"""A server with the tiers `host` and `disk` under 32 streams, whose tiers fail, and whose engine is
killed and stopped: answers are those of an undisturbed server, and none waits for long.
`NUM_FAULTS`: blocks that fail of each kind; `NUM_KILLS`: of the engine."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from frame.checkpoint.model_config import find_model
from tests.disaggregation.servers import ask
from tests.entrypoints.chaos.storm import restarts
from tests.entrypoints.serving import RunningServer, wait_until
from tests.kv_tiers import faulty_plugin
from tests.kv_tiers.faulty_tiers import FaultFile

pytestmark = pytest.mark.soak
NUM_FAULTS = int(os.environ.get("NUM_FAULTS", "50"))
NUM_KILLS = int(os.environ.get("NUM_KILLS", "5"))
STREAMS = 32
SLOW = 10.0  # seconds of a slow load of a block
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--page-size", "4", "--max-running-requests", "16"),
    *("--max-total-tokens", "1536", "--max-model-len", "128", "--min-load-tokens", "4", "--plugin", str(faulty_plugin.__file__)),
)
TIER_FAULTS = ("load", "store", "host_flip", "disk_flip", "short", "full", "read_only", "slow", "other_model")


def make_body(number: int) -> dict[str, Any]:
    prompt = [7 + (number * 131 + index * index * 3 + index * number) % 900 for index in range(50 + number % 13)]
    return {
        "prompt": prompt,
        "max_tokens": 4 + number % 9,
        "temperature": 0,
        "ignore_eos": True,
        "stream": number % 4 > 0,
        "return_token_ids": True,
    }


BODIES = [make_body(number) for number in range(2 * STREAMS)]


class Rig:
    """A server, the file that says how its tiers fail, and the answers of an undisturbed server."""

    def __init__(self, server: RunningServer, fault: Path, folder: Path, expected: list[Any]) -> None:
        self.server, self.fault, self.folder, self.expected = server, FaultFile(fault, SLOW), folder, expected
        self.lock = threading.Lock()
        self.patience = 60.0

    def ask_all(self, first: int = 0) -> tuple[list[Any], float]:
        """The answers to half of the bodies at once, and the seconds of the slowest."""
        slowest = 0.0

        def run(number: int) -> Any:
            nonlocal slowest
            began = time.monotonic()
            result = ask(self.server, BODIES[number])
            with self.lock:
                slowest = max(slowest, time.monotonic() - began)
            return result

        with ThreadPoolExecutor(STREAMS) as pool:
            return list(pool.map(run, range(first, first + STREAMS))), slowest

    def check(self, results: list[Any], first: int) -> None:
        wrong = [(one, other) for one, other in zip(results, self.expected[first : first + STREAMS], strict=True) if one[:3] != other[:3]]
        assert not wrong, wrong[:2]

    def check_left(self) -> None:
        """No page, lock or job is left."""
        wait_until(lambda: (info := self.server.get("/server_info"))["running"] + info["waiting"] == 0)
        wait_until(lambda: self.server.get("/server_info")["used_pages"] == 0)
        assert self.server.post("/check_integrity", {}).status_code == 200

    def count_descriptors(self) -> int:
        return sum(psutil.Process(child.pid).num_fds() for child in self.server.children().values())


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder, fault = tmp_path_factory.mktemp("blocks"), tmp_path_factory.mktemp("fault") / "fault"
    fault.write_text("")
    tiers: dict[str, dict[str, Any]] = {
        "faulty_host": {"size_gib": 0.008},
        "faulty_disk": {"folder": str(folder / "blocks"), "size_gib": 0.1, "buffer_gib": 0.02},
    }
    options = [f"plugins.options.kv_tier/{name}.{key}={value}" for name, row in tiers.items() for key, value in row.items()]
    flags = [*FLAGS, "--cache-tiers", "faulty_host,faulty_disk", *(flag for each in options for flag in ("--set", each))]
    flags += ["--max-restarts", "100000"]
    model = Path(find_model("frame-tiny"))
    with RunningServer(model, *FLAGS[:-4], fake=False) as plain:
        expected = [each for first in (0, STREAMS) for each in Rig(plain, fault, folder, []).ask_all(first)[0]]
    assert all(len(each) == 4 for each in expected), expected
    with RunningServer(model, *flags, fake=False, env={"FAULT_FILE": str(fault)}) as server:
        rig = Rig(server, fault, folder / "blocks", expected)
        computing = [rig.ask_all(first)[1] for first in (0, STREAMS)]
        rig.patience = 3 * max(computing) + 2.0  # the machine is not even
        yield rig
        rig.check_left()


def copy_foreign(folder: Path) -> int:
    """Blocks of this model become those of another one: their files have its names, and other
    contents. -> how many."""
    (own,) = [path for path in folder.iterdir() if path.is_dir()]
    files = sorted(own.glob("*.kv"))
    for one, other in zip(files[::2], files[1::2], strict=False):
        with contextlib.suppress(FileNotFoundError):  # it was evicted
            content = bytearray(other.read_bytes())
            content[8:40] = bytes(32)  # the identity
            target = one.with_suffix(".new")
            target.write_bytes(content)
            target.chmod(0o600)
            target.replace(one)
    return len(files) // 2


@pytest.mark.parametrize("name", TIER_FAULTS)
def test_a_tier_fails(rig: Rig, name: str) -> None:
    waited, number, before, foreign = 0.0, 0, rig.fault.count_faults(), 0
    while number < 4 or rig.fault.count_faults() - before + foreign < NUM_FAULTS:
        first = 0 if name == "host_flip" else STREAMS * (number % 2)  # the tier `host` holds half of the prompts
        if name == "other_model":
            foreign += copy_foreign(rig.folder)
        else:
            rig.fault.set_fault(name)
        results, seconds = rig.ask_all(first)
        rig.check(results, first)
        waited, number = max(waited, seconds), number + 1
        assert number < NUM_FAULTS, "the tier does not fail"
    rig.fault.set_fault("")
    print(
        f"{name}: {rig.fault.count_faults() - before + foreign} faults, slowest {waited:.2f} of {rig.patience:.2f} s",
        rig.server.get("/server_info")["tiers"],
    )
    results, undisturbed = rig.ask_all()
    rig.check(results, 0)
    assert waited <= max(rig.patience, 3 * undisturbed + 2.0)  # the machine may be slower now
    rig.check_left()


def test_requests_are_aborted_in_each_phase(rig: Rig) -> None:
    chance = random.Random(0)
    descriptors = rig.count_descriptors()
    for number in range(NUM_KILLS):
        rig.fault.set_fault("slow" if number % 3 == 0 else "")

        def leave(body: dict[str, Any]) -> None:
            with contextlib.suppress(httpx.TimeoutException), httpx.Client(timeout=chance.choice((0.01, 0.05, 0.2, 1.0))) as client:
                client.post(f"{rig.server.url}/v1/completions", json=body)

        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(leave, BODIES[:STREAMS]))
        rig.fault.set_fault("")
        first = STREAMS * (number % 2)
        rig.check(rig.ask_all(first)[0], first)
    rig.check_left()
    wait_until(lambda: rig.count_descriptors() <= descriptors + 2)


@pytest.mark.parametrize("sign", ["kill", "suspend"])
def test_the_engine_dies(rig: Rig, sign: str) -> None:
    chance = random.Random(1)
    for number in range(NUM_KILLS):
        first, before = STREAMS * (number % 2), restarts(rig.server)
        engine = rig.server.children()["scheduler"]
        timer = threading.Timer(chance.random() * 0.5, getattr(engine, sign))
        timer.start()
        results, _ = rig.ask_all(first)
        timer.join()
        rig.check(results, first)
        wait_until(lambda before=before: restarts(rig.server) > before, 30.0)
        wait_until(rig.server.ready, 60.0)
    print(f"{sign}: {NUM_KILLS} times, {rig.server.get('/server_info')['tiers']}")
    rig.check_left()
