"""`RequestRecovery`: what becomes of sequences while the engine is away, and of those that may have ended it. Knows no process and no
message.

After a death all come back where they were. Those that were on the device in two deaths, without getting any further in between, are
suspects: they come back one at a time, with nothing else in the engine, until they are past the place where it died. So the one that
ends the engine again is known, and it alone is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from frame.core.ipc.inflight_file import hash_request
from frame.entrypoints.engine_client.response_state import SequenceState

PASSED = 4  # tokens beyond the place of a death that clear a suspect: the last ones before it may not have reached us
SUSPECT = 2  # deaths at one place


class RequestRecovery:
    """`admit` sends a sequence to the engine from where it stands; `withdraw` takes it out again, unfinished. A sequence is held
    (here) or admitted (in the engine)."""

    def __init__(
        self, admit: Callable[[SequenceState], None], withdraw: Callable[[SequenceState], None], compiles_elsewhere: bool = False
    ) -> None:
        self.away: str | None = None  # why the engine takes nothing now
        self.on_trial: SequenceState | None = None
        self._compiles_elsewhere = compiles_elsewhere  # grammars, in processes that the engine outlives
        self._admit = admit
        self._withdraw = withdraw
        self._held: dict[str, SequenceState] = {}  # by rid, oldest first
        self._suspects: deque[SequenceState] = deque()

    def offer(self, sequence: SequenceState) -> None:
        """A new sequence: admitted, if the engine takes any now."""
        if self.away is not None or self.on_trial is not None:
            self._held[sequence.rid] = sequence
        else:
            self._admit(sequence)

    def is_held(self, sequence: SequenceState) -> bool:
        return sequence.rid in self._held

    @property
    def held(self) -> list[SequenceState]:
        return list(self._held.values())

    def drop(self, sequence: SequenceState) -> None:
        """The sequence ended, or nobody wants it any more."""
        self._held.pop(sequence.rid, None)
        if sequence is self.on_trial:
            self._go_on()

    def look(self) -> None:
        """There is news of `on_trial`: is the trial over?"""
        sequence = self.on_trial
        if sequence is None or (sequence.finish is None and sequence.num_tokens <= sequence.standing.died_at + PASSED):
            return
        if sequence.finish is None:
            sequence.standing.deaths = 0
            self._held[sequence.rid] = sequence
            self._withdraw(sequence)
        self._go_on()

    # deaths --------------------------------------------------------------------------------------------------------

    def blame(self, sequences: Iterable[SequenceState], on_device: Mapping[int, int]) -> SequenceState | None:
        """The engine died with these marks and prefilled tokens in its roster: count it for the sequences that were there; if it had
        nothing on the device, for all but those whose grammar another process may have been compiling. -> the one that is to be
        refused."""
        admitted = [sequence for sequence in sequences if sequence.rid not in self._held]
        if on_device:
            there = [sequence for sequence in admitted if hash_request(sequence.standing.name) in on_device]
        else:
            there = [sequence for sequence in admitted if not (self._compiles_elsewhere and _may_compile(sequence))]
        for sequence in there:
            standing = sequence.standing
            in_prompt = min(on_device.get(hash_request(standing.name), 0), len(sequence.prompt))
            if sequence.num_tokens > standing.died_at + PASSED or in_prompt > standing.died_in_prompt + PASSED:
                standing.deaths = 0
            standing.deaths += 1
            standing.died_at = sequence.num_tokens
            standing.died_in_prompt = max(standing.died_in_prompt, in_prompt)
        is_alone = len(on_device or there) == 1 == len(there)
        return there[0] if is_alone and there[0].standing.deaths >= SUSPECT else None

    def blame_text(self, sequences: Iterable[SequenceState], in_work: frozenset[int]) -> SequenceState | None:
        """The detokenizer died in the midst of this one's text: count it. -> the one that is to be refused. It works on one at a time, so
        nobody need come back alone to be found out."""
        for sequence in sequences:
            if sequence.rid in self._held or hash_request(sequence.standing.name) not in in_work:
                continue
            standing = sequence.standing
            if sequence.num_tokens > standing.text_died_at + PASSED:
                standing.text_deaths = 0
            standing.text_deaths += 1
            standing.text_died_at = sequence.num_tokens
            if standing.text_deaths >= SUSPECT:
                return sequence
        return None

    def hold(self, sequences: Sequence[SequenceState], reason: str) -> None:
        """The engine, or what it sends to, is away: all of these, oldest first, wait for `resume`."""
        self.away = reason
        self.on_trial = None
        self._held = {sequence.rid: sequence for sequence in sequences}

    def resume(self) -> None:
        """It is back: the suspects one by one, then all others at once."""
        self.away = None
        self._suspects = deque(sequence for sequence in self._held.values() if sequence.standing.deaths >= SUSPECT)
        self._go_on()

    def _go_on(self) -> None:
        self.on_trial = None
        while self._suspects:
            sequence = self._suspects.popleft()
            if self._held.pop(sequence.rid, None) is not None:
                self.on_trial = sequence
                self._admit(sequence)
                return
        held, self._held = self._held, {}
        for sequence in held.values():
            self._admit(sequence)


def _may_compile(sequence: SequenceState) -> bool:
    return sequence.params.grammar is not None and not sequence.num_tokens
