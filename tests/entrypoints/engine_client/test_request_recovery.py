"""Sequences while the engine is away: where they go on, who is suspected, and that the one that kills is refused alone."""

from __future__ import annotations

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.inflight_file import hash_request
from frame.entrypoints.engine_client.request_recovery import PASSED, RequestRecovery
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState


class Rig:
    """An engine that dies whenever `killer` is in it, told by its rid."""

    def __init__(self, *rids: str, killer: str = "", capacity: int = 100) -> None:
        self.inside: dict[str, SequenceState] = {}
        self.withdrawn: list[str] = []
        self.prefilled: dict[str, int] = {}  # tokens, by rid
        self.refused: list[str] = []
        self.deaths = 0
        self.killer = killer
        self.capacity = capacity  # places on the device
        self.recovery = RequestRecovery(self._admit, self._withdraw)
        self.all = [SequenceState(RequestState(rid), 0, 0, rid, [1] * 1000, SamplingParams()) for rid in rids]
        for sequence in self.all:
            self.recovery.offer(sequence)

    def _admit(self, sequence: SequenceState) -> None:
        self.inside[sequence.rid] = sequence

    def _withdraw(self, sequence: SequenceState) -> None:
        del self.inside[sequence.rid]
        self.withdrawn.append(sequence.rid)

    def step(self) -> bool:
        """Everybody on the device gets a token, or the engine dies. -> whether there is anything to do."""
        on_device = list(self.inside.values())[: self.capacity]
        if any(sequence.rid == self.killer for sequence in on_device):
            self.die(on_device)
            return True
        for sequence in on_device:
            sequence.standing.output.append(5)
            if sequence.num_tokens == 20:
                del self.inside[sequence.rid]
                self.all.remove(sequence)
                sequence.finish = True  # type: ignore[assignment]
        self.recovery.look()
        return bool(self.inside)

    def die(self, on_device: list[SequenceState]) -> None:
        self.deaths += 1
        inflight = {hash_request(sequence.standing.name): self.prefilled.get(sequence.rid, 0) for sequence in on_device}
        guilty = self.recovery.blame(self.all, inflight)
        self.inside.clear()
        self.recovery.hold(self.all, "it died")
        if guilty is not None:
            self.refused.append(guilty.rid)
            self.all.remove(guilty)
            self.recovery.drop(guilty)
        self.recovery.resume()


@pytest.mark.parametrize(("others", "capacity", "deaths"), [(0, 100, 2), (1, 100, 3), (9, 100, 3), (30, 4, 3)])
def test_the_killer_alone_is_refused(others: int, capacity: int, deaths: int) -> None:
    names = [f"r{i}" for i in range(others)]
    names.insert(others // 2, "killer")
    rig = Rig(*names, killer="killer", capacity=capacity)
    while rig.step():
        assert rig.deaths <= deaths
    assert (rig.refused, rig.deaths, rig.all) == (["killer"], deaths, [])


def test_a_death_that_nobody_repeats_costs_nothing() -> None:
    rig = Rig("a", "b")
    rig.step()
    rig.die(rig.all)
    assert list(rig.inside) == ["a", "b"]  # at once, both
    for _ in range(PASSED + 1):
        rig.step()
    rig.die(rig.all)  # they got further: it is the machine, not they
    assert list(rig.inside) == ["a", "b"]
    assert rig.withdrawn == []


def test_suspects_come_one_by_one_and_new_ones_wait() -> None:
    rig = Rig("a", "b")
    rig.die(rig.all)
    rig.die(rig.all)
    assert list(rig.inside) == ["a"]
    new = SequenceState(RequestState("new"), 0, 0, "new", [1], SamplingParams())
    rig.all.append(new)
    rig.recovery.offer(new)
    assert rig.recovery.is_held(new)
    for _ in range(PASSED + 1):
        assert list(rig.inside) == ["a"]
        rig.step()
    assert (rig.withdrawn, list(rig.inside)) == (["a"], ["b"])
    rig.recovery.drop(rig.all[1])  # its client left
    assert list(rig.inside) == ["b", "new", "a"]


def test_with_nothing_on_the_device_all_are_counted() -> None:
    rig = Rig("a", "b")
    rig.die([])
    assert [sequence.standing.deaths for sequence in rig.all] == [1, 1]
    stranger = {hash_request("somebody whose client left"): 0}
    assert rig.recovery.blame(rig.all, stranger) is None
    assert [sequence.standing.deaths for sequence in rig.all] == [1, 1]


def test_who_ends_the_detokenizer_twice_at_one_place_is_refused() -> None:
    rig = Rig("a", "b", "c")
    at_work = [frozenset([hash_request(sequence.standing.name)]) for sequence in rig.all]
    nobody: frozenset[int] = frozenset()
    assert rig.recovery.blame_text(rig.all, at_work[1]) is None
    assert rig.recovery.blame_text(rig.all, at_work[0]) is None
    assert rig.recovery.blame_text(rig.all, nobody) is None  # killed between two texts: it is nobody's fault
    for _ in range(PASSED + 1):
        rig.step()
    assert rig.recovery.blame_text(rig.all, at_work[1]) is None  # it got further
    assert rig.recovery.blame_text(rig.all, at_work[1]) is rig.all[1]
    assert [sequence.standing.deaths for sequence in rig.all] == [0, 0, 0]  # the engine's are counted apart


def test_who_gets_further_in_its_prompt_is_not_suspected() -> None:
    rig = Rig("a")
    for prefilled in (100, 200, 500, 900, 1000):  # killed from outside, in ever later chunks
        rig.prefilled["a"] = prefilled
        rig.die(rig.all)
        assert (rig.refused, rig.all[0].standing.deaths) == ([], 1)
    rig.prefilled["a"] = 1050  # the output counts as a prompt when it is computed again, and is no progress
    rig.die(rig.all)
    assert rig.refused == ["a"]


def test_who_waits_for_a_grammar_is_not_suspected() -> None:
    """The compiler is another process, whose end is not the engine's."""
    rig = Rig()
    for compiles_elsewhere in (True, False):
        rig.recovery = RequestRecovery(rig._admit, rig._withdraw, compiles_elsewhere)
        waits = SequenceState(RequestState("g"), 0, 0, "g", [1], SamplingParams(regex="a+"))
        for _ in range(3):
            assert rig.recovery.blame([waits], {}) is None or not compiles_elsewhere
        assert waits.standing.deaths == (0 if compiles_elsewhere else 3)
