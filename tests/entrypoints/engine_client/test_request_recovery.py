"""Recovery after crashes: sequences continue, suspects run alone, and only the sequence that causes
the crashes is refused.

Also the messages that admit a sequence, first and after a crash.
"""

from __future__ import annotations

import time

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.inflight_file import hash_request
from frame.core.messages import Generate, TokenLogprobs
from frame.entrypoints.engine_client.request_recovery import (
    MAX_KILLS,
    MIN_DEADLINE,
    PROGRESS,
    RequestRecovery,
    build_generate,
    build_start_detokenize,
)
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState


class Rig:
    """An engine that crashes whenever the sequence named `cause` is on the device."""

    def __init__(self, *rids: str, cause: str = "", capacity: int = 100) -> None:
        self.inside: dict[str, SequenceState] = {}
        self.withdrawn: list[str] = []
        self.prefilled: dict[str, int] = {}  # tokens, by rid
        self.refused: list[str] = []
        self.crashes = 0
        self.cause = cause
        self.capacity = capacity  # sequences on the device
        self.recovery = RequestRecovery(self._admit, self._withdraw)
        self.all = [SequenceState(RequestState(rid), 0, 0, rid, [1] * 1000, SamplingParams()) for rid in rids]
        for sequence in self.all:
            self.recovery.add_sequence(sequence)

    def _admit(self, sequence: SequenceState) -> None:
        self.inside[sequence.rid] = sequence

    def _withdraw(self, sequence: SequenceState) -> None:
        del self.inside[sequence.rid]
        self.withdrawn.append(sequence.rid)

    def step(self) -> bool:
        """Each sequence on the device gets a token, or the engine crashes. Returns whether there is
        work left."""
        on_device = list(self.inside.values())[: self.capacity]
        if any(sequence.rid == self.cause for sequence in on_device):
            self.crash(on_device)
            return True
        for sequence in on_device:
            sequence.recovery.output_ids.append(5)
            if sequence.num_tokens == 20:
                del self.inside[sequence.rid]
                self.all.remove(sequence)
                sequence.finish = True  # type: ignore[assignment]
        self.recovery.check_isolated()
        return bool(self.inside)

    def crash(self, on_device: list[SequenceState], *, is_killed: bool = False) -> None:
        self.crashes += 1
        inflight = {hash_request(sequence.recovery.engine_rid): self.prefilled.get(sequence.rid, 0) for sequence in on_device}
        found = self.recovery.record_crash(self.all, inflight, is_killed=is_killed)
        self.inside.clear()
        self.recovery.hold_sequences(self.all, "it crashed")
        if found is not None:
            self.refused.append(found.rid)
            self.all.remove(found)
            self.recovery.remove_sequence(found)
        self.recovery.resume_sequences()


@pytest.mark.parametrize(("others", "capacity", "crashes"), [(0, 100, 2), (1, 100, 3), (9, 100, 3), (30, 4, 3)])
def test_only_the_cause_is_refused(others: int, capacity: int, crashes: int) -> None:
    names = [f"r{i}" for i in range(others)]
    names.insert(others // 2, "cause")
    rig = Rig(*names, cause="cause", capacity=capacity)
    while rig.step():
        assert rig.crashes <= crashes
    assert (rig.refused, rig.crashes, rig.all) == (["cause"], crashes, [])


def test_a_single_crash_delays_no_sequence() -> None:
    rig = Rig("a", "b")
    rig.step()
    rig.crash(rig.all)
    assert list(rig.inside) == ["a", "b"]  # both at once
    for _ in range(PROGRESS + 1):
        rig.step()
    rig.crash(rig.all)  # they made progress: the machine is at fault
    assert list(rig.inside) == ["a", "b"]
    assert rig.withdrawn == []


def test_suspects_run_alone_and_new_sequences_wait() -> None:
    rig = Rig("a", "b")
    rig.crash(rig.all)
    rig.crash(rig.all)
    assert list(rig.inside) == ["a"]
    new = SequenceState(RequestState("new"), 0, 0, "new", [1], SamplingParams())
    rig.all.append(new)
    rig.recovery.add_sequence(new)
    assert rig.recovery.is_held(new)
    for _ in range(PROGRESS + 1):
        assert list(rig.inside) == ["a"]
        rig.step()
    assert (rig.withdrawn, list(rig.inside)) == (["a"], ["b"])
    rig.recovery.remove_sequence(rig.all[1])  # its client left
    assert list(rig.inside) == ["b", "new", "a"]


def test_kills_from_outside_refuse_a_suspect_later() -> None:
    """A request whose engine ends by itself is refused at once."""
    rig = Rig("a", "b")
    for _ in range(MAX_KILLS - 1):
        rig.crash(list(rig.inside.values()), is_killed=True)
        assert (rig.refused, list(rig.inside)[:1]) == ([], ["a"])
    rig.crash(list(rig.inside.values()), is_killed=True)
    assert (rig.refused, list(rig.inside)) == (["a"], ["b"])
    rig.crash(list(rig.inside.values()))
    assert rig.refused == ["a", "b"]


def test_a_crash_with_an_empty_device_counts_for_all() -> None:
    rig = Rig("a", "b")
    rig.crash([])
    assert [sequence.recovery.num_crashes for sequence in rig.all] == [1, 1]
    abandoned = {hash_request("a request whose client left"): 0}
    assert rig.recovery.record_crash(rig.all, abandoned) is None
    assert [sequence.recovery.num_crashes for sequence in rig.all] == [1, 1]


def test_a_request_that_crashes_the_detokenizer_twice_at_one_position_is_refused() -> None:
    rig = Rig("a", "b", "c")
    in_progress = [frozenset([hash_request(sequence.recovery.engine_rid)]) for sequence in rig.all]
    idle: frozenset[int] = frozenset()
    assert rig.recovery.record_detokenizer_crash(rig.all, in_progress[1]) is None
    assert rig.recovery.record_detokenizer_crash(rig.all, in_progress[0]) is None
    assert rig.recovery.record_detokenizer_crash(rig.all, idle) is None  # killed between two texts: no request is the cause
    for _ in range(PROGRESS + 1):
        rig.step()
    assert rig.recovery.record_detokenizer_crash(rig.all, in_progress[1]) is None  # it made progress
    assert rig.recovery.record_detokenizer_crash(rig.all, in_progress[1]) is rig.all[1]
    assert [sequence.recovery.num_crashes for sequence in rig.all] == [0, 0, 0]  # crashes of the engine are counted separately


def test_progress_in_the_prompt_clears_a_suspect() -> None:
    rig = Rig("a")
    for prefilled in (100, 200, 500, 900, 1000):  # killed from outside, in ever later chunks
        rig.prefilled["a"] = prefilled
        rig.crash(rig.all)
        assert (rig.refused, rig.all[0].recovery.num_crashes) == ([], 1)
    rig.prefilled["a"] = 1050  # the output is prefilled again after a crash, which is no progress
    rig.crash(rig.all)
    assert rig.refused == ["a"]


def test_a_sequence_that_waits_for_a_grammar_is_no_suspect() -> None:
    """Grammars are compiled in another process, whose crash is not the engine's."""
    rig = Rig()
    for compiles_elsewhere in (True, False):
        rig.recovery = RequestRecovery(rig._admit, rig._withdraw, compiles_elsewhere)
        waits = SequenceState(RequestState("g"), 0, 0, "g", [1], SamplingParams(regex="a+"))
        for _ in range(3):
            assert rig.recovery.record_crash([waits], {}) is None or not compiles_elsewhere
        assert waits.recovery.num_crashes == (0 if compiles_elsewhere else 3)


# messages
# --------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=9, seed=3, prompt_logprobs=1)


def submitted(seconds: float) -> SequenceState:
    sequence = SequenceState(RequestState("r"), 0, 0, "r", [1, 2, 3], PARAMS)
    sequence.recovery.generate = Generate(rid="r", token_ids=[1, 2, 3], params=PARAMS, namespace="salt")
    sequence.recovery.expires_at = time.monotonic() + seconds
    return sequence


def test_messages_of_the_first_and_of_a_recovered_admission() -> None:
    sequence = submitted(100.0)
    first = build_generate(sequence)
    assert (first.rid, first.token_ids, first.output_len, first.namespace) == ("r", [1, 2, 3], 0, "salt")
    sequence.recovery.num_admissions = 1
    sequence.recovery.engine_rid = "r~2"
    sequence.recovery.output_ids.extend([7, 8])
    again = build_generate(sequence)
    assert (again.rid, again.token_ids, again.output_len, again.namespace) == ("r~2", [1, 2, 3, 7, 8], 2, "salt")
    assert again.params == PARAMS  # the prompt's logprobs have not arrived
    sequence.prompt_logprobs = TokenLogprobs([1, 2, 3], [None, -1.0, -2.0], [[], [], []])
    assert build_generate(sequence).params.prompt_logprobs is None
    start = build_start_detokenize(sequence, again)
    assert (start.rid, start.prompt_tail, start.token_ids) == ("r~2", [1, 2, 3], [7, 8])


@pytest.mark.parametrize("admissions", [0, 1])
def test_the_deadline_is_what_is_left(admissions: int) -> None:
    waited, late = submitted(10.0), submitted(-1.0)
    waited.recovery.num_admissions = late.recovery.num_admissions = admissions
    assert 0 < (build_generate(waited).deadline or 0) <= 10.0
    assert build_generate(late).deadline == MIN_DEADLINE


def test_a_sequence_that_was_never_started() -> None:
    with pytest.raises(RuntimeError, match="r was never submitted"):
        build_generate(SequenceState(RequestState("r"), 0, 0, "r", [1], PARAMS))
