"""A trainer that is killed in a phase of an update, run by `test_faulty_trainers.py`:
`python -m tests.entrypoints.http.operations.killed_trainer URL FILE KIND PHASE`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed

from frame.rl.weight_client import WeightClient


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_rendezvous(client: Any) -> None:
    store = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    info = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    threading.Thread(target=lambda: client._step("open", kind="group", name="dead", info=info), daemon=True).start()
    time.sleep(0.5)
    die()


class Silent:
    """A process group that broadcasts nothing of the second part."""

    def __init__(self, group: Any, steps: list[str]) -> None:
        self._group, self._steps = group, steps

    def broadcast(self, *arguments: Any) -> Any:
        return self._group.broadcast(*arguments) if self._steps.count("part") < 2 else time.sleep(60)


def die_in_update(client: Any, tensors: dict[str, torch.Tensor], kind: str, phase: str) -> None:
    steps, step = list[str](), client._step

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(tensors.items()):
            if phase == "later" and number == 4:
                die()
            yield pair

    def watched(which: str, /, **fields: Any) -> Any:
        steps.append(which)
        if phase == "part" and which == "part" and steps.count("part") == 2:
            # the engine has the message: nothing is broadcast, and the memory is not unmapped
            threading.Thread(target=lambda: step(which, **fields), daemon=True).start()
            time.sleep(0.3)
            die()
        if phase == which == "commit":
            die()
        reply = step(which, **fields)
        if phase == which == "begin":
            die()
        return reply

    client._step = watched
    if kind == "group" and phase == "part":
        client._group = Silent(client._group, steps)
    client.update(pairs(), "never", bucket_bytes=1)


def main(url: str, file: str, kind: str, phase: str) -> None:
    client, tensors = WeightClient(url), load_file(file)
    if phase == "rendezvous":
        die_at_rendezvous(client)
    if kind == "group":
        client.join_group()
    if phase == "joined":
        die()
    die_in_update(client, tensors, kind, phase)


if __name__ == "__main__":
    main(*sys.argv[1:])
