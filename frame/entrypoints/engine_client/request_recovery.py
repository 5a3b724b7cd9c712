"""`RequestRecovery`: requests continue after a crash; a request that causes crashes is refused.

A sequence that was on the device in two crashes, without progress in between, is refused if it was
there alone. Otherwise it is a suspect and runs alone in the engine until it has passed the position
of the crash. If the engine crashes again, that suspect is refused; all others continue. A process
that was killed from outside (SIGKILL, by an operator or the kernel for want of memory) says little
about its requests: a suspect is refused after more of these. Used by `EngineClient`. Must not know
a process or a transport.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from frame.core.ipc.inflight_file import hash_request
from frame.core.messages import Generate, StartDetokenize
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.text.incremental_decoder import PROMPT_TAIL

PROGRESS = 4  # tokens past the position of a crash that clear a suspect: the last ones before the crash may not have arrived
MAX_CRASHES = 2  # at one position, after which a sequence is a suspect
MAX_KILLS = 5  # at one position, the last one alone, after which a sequence whose engine is killed is refused
MIN_DEADLINE = 0.001  # seconds; sent for a deadline that has passed, so that the engine ends the request


def build_generate(sequence: SequenceState) -> Generate:
    """The message that admits a sequence, again after a crash: prompt and output so far, and the
    rest of its deadline. Raises RuntimeError for a sequence that was never started."""
    recovery = sequence.recovery
    message = recovery.generate
    if message is None:
        raise RuntimeError(f"{sequence.rid} was never submitted")
    minimum = min(MIN_DEADLINE, message.deadline or MIN_DEADLINE)  # a client may ask for less, and reads it in the error
    deadline = max(minimum, round(recovery.expires_at - time.monotonic(), 3))
    if not recovery.num_admissions and not recovery.output_ids:
        return msgspec.structs.replace(message, deadline=deadline)
    has_prompt_logprobs = sequence.prompt_logprobs is not None
    output = list(recovery.output_ids)
    return msgspec.structs.replace(
        message,
        rid=recovery.engine_rid,
        token_ids=sequence.prompt + output,
        params=msgspec.structs.replace(message.params, prompt_logprobs=None) if has_prompt_logprobs else message.params,
        output_len=len(output),
        deadline=deadline,
    )


def build_start_detokenize(sequence: SequenceState, message: Generate) -> StartDetokenize:
    """The message that the detokenizer gets before the tokens that `message` asks for."""
    return StartDetokenize(
        rid=message.rid,
        params=message.params,
        prompt_tail=sequence.prompt[-PROMPT_TAIL:],
        token_ids=list(sequence.recovery.output_ids),
        trace=message.trace,
    )


class RequestRecovery:
    """`admit` sends a sequence to the engine, from its last token on; `withdraw` takes an
    unfinished one out again. Each sequence is either held (here) or admitted (in the engine)."""

    def __init__(
        self, admit: Callable[[SequenceState], None], withdraw: Callable[[SequenceState], None], compiles_elsewhere: bool = False
    ) -> None:
        self.unavailable_reason: str | None = None  # None: the engine takes requests
        self.isolated: SequenceState | None = None  # the suspect that runs alone
        self._compiles_elsewhere = compiles_elsewhere  # grammars are compiled in other processes, whose crash is not the engine's
        self._admit = admit
        self._withdraw = withdraw
        self._held: dict[str, SequenceState] = {}  # by rid, oldest first
        self._suspects: deque[SequenceState] = deque()

    def add_sequence(self, sequence: SequenceState) -> None:
        """Admit a new sequence, or hold it while the engine is away or runs a suspect."""
        if self.unavailable_reason is not None or self.isolated is not None:
            self._held[sequence.rid] = sequence
        else:
            self._admit(sequence)

    def is_held(self, sequence: SequenceState) -> bool:
        return sequence.rid in self._held

    @property
    def held(self) -> list[SequenceState]:
        return list(self._held.values())

    def remove_sequence(self, sequence: SequenceState) -> None:
        """The sequence has ended, or its client has left."""
        self._held.pop(sequence.rid, None)
        if sequence is self.isolated:
            self._admit_next()

    def check_isolated(self) -> None:
        """End the solo run of a suspect that has finished or made progress."""
        sequence = self.isolated
        if sequence is None or (sequence.finish is None and sequence.num_tokens <= sequence.recovery.crash_num_tokens + PROGRESS):
            return
        if sequence.finish is None:
            sequence.recovery.num_crashes = 0
            self._held[sequence.rid] = sequence
            self._withdraw(sequence)
        self._admit_next()

    # crashes --------------------------------------------------------------------------------------

    def record_crash(
        self, sequences: Iterable[SequenceState], on_device: Mapping[int, int], *, is_killed: bool = False
    ) -> SequenceState | None:
        """Count an engine crash for the sequences that were on the device and return the one that
        caused it, if that is certain. is_killed: SIGKILL ended the engine.

        `on_device` is the content of the in-flight file: prefilled tokens by request hash. Where it
        is empty, the crash counts for all admitted sequences but those whose grammar another
        process may have been compiling.
        """
        admitted = [sequence for sequence in sequences if sequence.rid not in self._held]
        if on_device:
            involved = [sequence for sequence in admitted if hash_request(sequence.recovery.engine_rid) in on_device]
        else:
            involved = [sequence for sequence in admitted if not (self._compiles_elsewhere and _may_compile(sequence))]
        for sequence in involved:
            recovery = sequence.recovery
            num_prefilled = min(on_device.get(hash_request(recovery.engine_rid), 0), len(sequence.prompt))
            if sequence.num_tokens > recovery.crash_num_tokens + PROGRESS or num_prefilled > recovery.crash_num_prefilled + PROGRESS:
                recovery.num_crashes = 0
            recovery.num_crashes += 1
            recovery.crash_num_tokens = sequence.num_tokens
            recovery.crash_num_prefilled = max(recovery.crash_num_prefilled, num_prefilled)
        is_alone = len(on_device or involved) == 1 == len(involved)
        maximum = MAX_KILLS if is_killed else MAX_CRASHES
        return involved[0] if is_alone and involved[0].recovery.num_crashes >= maximum else None

    def record_detokenizer_crash(self, sequences: Iterable[SequenceState], in_progress: frozenset[int]) -> SequenceState | None:
        """Count a detokenizer crash for the sequence whose text was in progress (by request hash),
        and return it once it has caused MAX_CRASHES. The detokenizer works on one sequence at a
        time, so no solo run is needed."""
        for sequence in sequences:
            if sequence.rid in self._held or hash_request(sequence.recovery.engine_rid) not in in_progress:
                continue
            recovery = sequence.recovery
            if sequence.num_tokens > recovery.text_crash_num_tokens + PROGRESS:
                recovery.num_text_crashes = 0
            recovery.num_text_crashes += 1
            recovery.text_crash_num_tokens = sequence.num_tokens
            if recovery.num_text_crashes >= MAX_CRASHES:
                return sequence
        return None

    def hold_sequences(self, sequences: Sequence[SequenceState], reason: str) -> None:
        """The process is away: hold these, oldest first, until `resume_sequences`."""
        self.unavailable_reason = reason
        self.isolated = None
        self._held = {sequence.rid: sequence for sequence in sequences}

    def resume_sequences(self) -> None:
        """The process is back: admit the suspects one at a time, then all others."""
        self.unavailable_reason = None
        self._suspects = deque(sequence for sequence in self._held.values() if sequence.recovery.num_crashes >= MAX_CRASHES)
        self._admit_next()

    def _admit_next(self) -> None:
        self.isolated = None
        while self._suspects:
            sequence = self._suspects.popleft()
            if self._held.pop(sequence.rid, None) is not None:
                self.isolated = sequence
                self._admit(sequence)
                return
        held, self._held = self._held, {}
        for sequence in held.values():
            self._admit(sequence)


def _may_compile(sequence: SequenceState) -> bool:
    return sequence.params.grammar is not None and not sequence.num_tokens
