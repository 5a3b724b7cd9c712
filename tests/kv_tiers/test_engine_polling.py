"""The engine's loop polls the tiers until their copies have ended, also without requests and while
it is paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from frame.core.engine import Engine, EngineOptions
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import Control, ControlReply, Generate, StepTokens
from frame.loading.engine_states import EngineStates
from tests.core.scheduling.small_rig import config, policy
from tests.kv_tiers.tier_rig import TierRig


@contextmanager
def serve(rig: TierRig) -> Iterator[InProcessTransport]:
    """An engine in a thread over the rig's scheduler and runner."""
    near, far = InProcessTransport.pair()
    engine = Engine(rig.scheduler, rig.runner, far, EngineOptions(make_states=EngineStates))
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    try:
        yield near
    finally:
        near.send(Control(id="stop", action="shutdown"))
        thread.join(10)
        assert not thread.is_alive()


def wait_for(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.002)


def finish(near: InProcessTransport, rid: str) -> None:
    while not any(rid in message.rids and message.finishes for message in near.receive(20.0) if isinstance(message, StepTokens)):
        pass


@pytest.mark.parametrize("is_paused", [False, True])
def test_stores_complete_without_requests(is_paused: bool) -> None:
    rig = TierRig(config(), policy())
    rig.now = time.monotonic()  # the engine's clock
    rig.mover.is_held = True
    with serve(rig) as near:
        near.send(Generate(rid="one", token_ids=list(range(40, 60)), params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
        finish(near, "one")
        if is_paused:
            near.send(Control(id="pause", action="pause"))
            while not any(isinstance(message, ControlReply) for message in near.receive(20.0)):
                pass
        rig.mover.is_held = False
        wait_for(lambda: len(rig.tiers[0].blocks) == 5)
        wait_for(lambda: rig.scheduler.is_idle)
    assert rig.mover.is_closed
    assert rig.tiers[0].is_closed
