"""Sends the sequences of a dump again, at their arrival times, and compares tokens and latencies
with those of the record. Used by `frame replay` and `frame bench serve --dump`."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.limits import to_fields
from frame.entrypoints.engine_client.request_dump import RecordedSequence
from frame.entrypoints.tools.bench.dump import MAX_TEMPERATURE, Recorded
from frame.entrypoints.tools.bench.load import Target, run
from frame.entrypoints.tools.bench.summary import Timing, percentiles, row
from frame.entrypoints.tools.bench.workload import Job

MAX_AT_ONCE = 256  # requests, where all are sent at once
SHOWN = 5  # differences
# Parameters whose field of /v1/completions has another name
_RENAMED = {"choice": "guided_choice", "whitespace_pattern": "guided_whitespace_pattern"}
_SAME_FIELDS = frozenset({
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "seed", "stop", "stop_regex", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs", "logprob_token_ids", "json_schema", "regex",
    "ebnf", "structural_tag", "disable_any_whitespace", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "num_speculative_tokens", "stream_interval", "custom",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplayJob(Job):
    """A recorded sequence as a request. `params`: those that repeat the record."""

    line: RecordedSequence
    params: SamplingParams
    expected: array[int] | None  # None: shapes

    @property
    def is_completion(self) -> bool:
        """Whether `/v1/completions` has all its parameters; else `/generate` does, whose events
        repeat all earlier tokens."""
        known = _SAME_FIELDS | _RENAMED.keys() | {"json_object"}
        return self.params.temperature <= MAX_TEMPERATURE and msgspec.to_builtins(self.params).keys() <= known


@dataclass(frozen=True, slots=True)
class ReplayTarget(Target):
    """A server that gets recorded sequences."""

    def route(self, job: Job) -> str:
        assert isinstance(job, ReplayJob)
        return "/v1/completions" if job.is_completion else "/generate"

    def body(self, job: Job) -> bytes:
        assert isinstance(job, ReplayJob)
        line, params = job.line, to_fields(job.params)
        model = line.adapter if line.adapter.strip("-") else self.model
        fields: dict[str, Any] = {"model": model, "stream": True, "priority": line.priority}
        if job.is_completion:
            if params.pop("json_object", False):
                fields["response_format"] = {"type": "json_object"}
            fields |= {_RENAMED.get(name, name): value for name, value in params.items()}
            fields |= {"prompt": job.prompt, "return_token_ids": True, "stream_options": {"include_usage": True}}
        else:
            fields |= {"input_ids": job.prompt, "sampling_params": params}
        return msgspec.json.encode(fields)


def build_jobs(sequences: Sequence[Recorded], speed: float, vocab_size: int) -> tuple[list[ReplayJob], Counter[str]]:
    """The requests that repeat a dump, and how many sequences cannot be repeated, by reason.
    `speed`: how many times as fast; infinite: all at once."""
    jobs, skipped = [], Counter[str]()
    start = sequences[0].line.at
    for recorded in sequences:
        line = recorded.line
        reason = "have media" if line.media else "have blocks of another server" if line.is_transferred else "have no output"
        if line.media or line.is_transferred or not line.num_output:
            skipped[reason] += 1
        else:
            at = (line.at - start) / speed
            prompt, params = recorded.build_prompt(vocab_size), _build_params(recorded)
            jobs.append(ReplayJob(prompt, line.num_output, at, params.temperature, line, params, recorded.output))
    return jobs, skipped


def _build_params(recorded: Recorded) -> SamplingParams:
    """The parameters that yield the recorded tokens, and not many more: a client may have left, or
    the end of the context may have come."""
    line, params = recorded.line, recorded.line.params
    if recorded.output is None:
        params = msgspec.structs.replace(params, min_tokens=0)
        return msgspec.structs.replace(params, max_tokens=line.num_output, ignore_eos=True, logprobs=None, prompt_logprobs=None)
    limit = params.max_tokens
    if limit is None or line.finish not in ("stop", "length"):
        limit = line.num_output + (line.finish == "stop")
    words = () if params.bad_words else params.bad_words_ids  # the server makes the ids of the words again
    return msgspec.structs.replace(
        params, max_tokens=limit, min_tokens=min(params.min_tokens, limit), prompt_logprobs=None, bad_words_ids=words, n=1
    )


def replay(target: ReplayTarget, jobs: Sequence[ReplayJob], concurrency: int | None) -> dict[str, dict[str, Any]]:
    """Send all requests. -> the rows of a report: the record, and this run."""
    if concurrency is None and all(job.at == 0.0 for job in jobs):
        concurrency = MAX_AT_ONCE
    timings = asyncio.run(run(target, jobs, concurrency, "recorded requests"))
    measured = row(timings)
    measured["arrival_error_ms"] = percentiles([timing.sent - timing.due for timing in timings if timing.sent])
    pairs = [(job, timing) for job, timing in zip(jobs, timings, strict=True) if job.expected is not None and not timing.error]
    if pairs:
        differing = [(job, timing) for job, timing in pairs if job.expected != timing.ids]
        measured |= {"equal": len(pairs) - len(differing), "different": len(differing)}
        measured["differences"] = [describe_difference(*pair) for pair in differing[:SHOWN]]
    return {"recorded": _recorded_row(jobs), "replayed": measured}


def describe_difference(job: ReplayJob, timing: Timing) -> str:
    """Where an output differs from the record."""
    expected = job.expected or array("i")
    place = next((i for i, (a, b) in enumerate(zip(expected, timing.ids, strict=False)) if a != b), min(len(expected), len(timing.ids)))
    return f"{job.line.id!r} from output token {place} on ({len(expected)} recorded, {len(timing.ids)} now)"


def _recorded_row(jobs: Sequence[ReplayJob]) -> dict[str, Any]:
    """The latencies of the record, which the server has measured, in the figures of a run."""
    start = min(job.line.at for job in jobs)
    timings = []
    for job in jobs:
        line = job.line
        due = line.at - start
        events = [] if line.first is None or line.last is None else [due + line.first, due + line.last]
        timings.append(Timing(due, line.num_prompt, due, events, line.num_output, error="" if events else "no token"))
    figures = row(timings)
    figures.pop("between_events_ms", None)  # the record has the first and the last event of each
    figures["errors"] = []
    return figures


def parse_speed(text: str) -> float:
    """`max`, or how many times as fast. Raises ValueError."""
    try:
        speed = math.inf if text == "max" else float(text)
    except ValueError:
        speed = math.nan
    if text != "max" and not 0.01 <= speed <= 1000:  # nan too
        raise ValueError(f"{text!r} is no speed; write max, or a factor from 0.01 to 1000 such as 1")
    return speed
