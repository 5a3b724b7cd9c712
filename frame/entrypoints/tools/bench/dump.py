"""Reads the files of `log.request_dump`, which may be damaged or hostile. Used by `frame replay`
and `frame bench serve --dump`. Must not know a server."""

from __future__ import annotations

import math
import random
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from frame.core.errors import ConfigError
from frame.entrypoints.engine_client.request_dump import PATTERNS, VERSION, DumpHead, RecordedSequence
from frame.entrypoints.tools.bench.workload import Arrivals, Job

MAX_FILES = 1024
MAX_BYTES = 4 << 30  # of all files
MAX_LINE = 64 << 20
MAX_SEQUENCES = 1_000_000
MAX_SPAN = 7 * 86400.0  # seconds from the first arrival to the last
MAX_TOKENS = 1 << 22  # of a sequence
MAX_ALL_TOKENS = 1 << 27  # of all prompts, which are built before the first request: some 5 GB
MAX_TEMPERATURE = 2.0  # of /v1/completions
FIRST_ID = 10  # the lowest ids are often special tokens


@dataclass(frozen=True, slots=True)
class Recorded:
    """A sequence of a dump. `prompt` and `output` are in arrays, not in `line`; None: shapes."""

    line: RecordedSequence
    block: int
    prompt: array[int] | None
    output: array[int] | None

    def build_prompt(self, vocab_size: int) -> list[int]:
        """The prompt; of shapes random tokens, equal where the recorded prompts had equal
        prefixes of whole blocks."""
        if self.prompt is not None:
            return self.prompt.tolist()
        ids = range(min(FIRST_ID, vocab_size - 1), vocab_size)
        tokens = [token for key in self.line.blocks for token in random.Random(key).choices(ids, k=self.block)]
        return tokens + random.Random(self.line.id).choices(ids, k=self.line.num_prompt - len(tokens))


@dataclass(frozen=True, slots=True)
class RecordedWorkload:
    """The prompts and output lengths of a dump as a workload of `frame bench serve`, at their
    recorded arrival times unless a rate is given. Each seed has the same prompts."""

    sequences: list[Recorded]

    def jobs(self, vocab_size: int, seed: int, arrivals: Arrivals | None = None) -> list[Job]:
        used = [recorded for recorded in self.sequences if recorded.line.num_output and not recorded.line.media]
        if not used:
            raise ConfigError("The dump has no sequence with an output and without media.")
        times = [recorded.line.at - used[0].line.at for recorded in used]
        if arrivals is not None and not math.isinf(arrivals.rate):
            times = arrivals.times(len(used), random.Random(seed))
        return [
            Job(recorded.build_prompt(vocab_size), recorded.line.num_output, at, min(recorded.line.params.temperature, MAX_TEMPERATURE))
            for recorded, at in zip(used, times, strict=True)
        ]


def read_dump(path: Path) -> list[Recorded]:
    """The sequences of a file, or of all files of a folder, in the order of their arrival. Raises
    ConfigError with the line that is at fault."""
    sequences: list[Recorded] = []
    size = tokens = 0
    for file in _list_files(path):
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{file} is no file; name a file or the folder of log.request_dump.")
            if (size := size + status.st_size) > MAX_BYTES:
                raise ConfigError(f"{path} has more than {MAX_BYTES >> 30} GiB; name fewer files.")
            for recorded in _read_file(file):
                sequences.append(recorded)
                tokens += recorded.line.num_prompt
                if len(sequences) > MAX_SEQUENCES:
                    raise ConfigError(f"{path} has more than {MAX_SEQUENCES} sequences; name fewer files.")
                if tokens > MAX_ALL_TOKENS:
                    raise ConfigError(f"{path} has prompts of more than {MAX_ALL_TOKENS:,} tokens together; name fewer files.")
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}); name a file or the folder of log.request_dump.") from None
    if not sequences:
        raise ConfigError(f"{path} has no recorded sequences; record some with --request-dump.")
    sequences.sort(key=lambda recorded: recorded.line.at)
    if (span := sequences[-1].line.at - sequences[0].line.at) > MAX_SPAN:
        raise ConfigError(f"{path} spans {span / 86400:.0f} days, and at most {MAX_SPAN / 86400:.0f} can be replayed; name fewer files.")
    return sequences


def _list_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for pattern in PATTERNS for file in path.glob(pattern))
    if len(files) > MAX_FILES:
        raise ConfigError(f"{path} has more than {MAX_FILES} files; name one of them.")
    return files


def _read_file(file: Path) -> Iterator[Recorded]:
    lines = msgspec.json.Decoder(RecordedSequence)
    with file.open("rb") as data:
        head = _decode_head(file, data.readline(4096))
        number = 1
        while line := data.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise ConfigError(f"{file}:{number} has more than {MAX_LINE >> 20} MiB, which no server writes; remove the line.")
            try:
                read = lines.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(f"{file}:{number} is damaged ({error}); remove the line.") from None
            if (fault := _find_fault(read, head)) is not None:
                raise ConfigError(f"{file}:{number} is damaged ({fault}); remove the line.")
            prompt = None if read.prompt is None else array("i", read.prompt)
            output = None if read.output is None else array("i", read.output)
            yield Recorded(msgspec.structs.replace(read, prompt=None, output=None), head.block, prompt, output)


def _decode_head(file: Path, line: bytes) -> DumpHead:
    try:
        head = msgspec.json.decode(line, type=DumpHead)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{file} is no request dump: its first line names another format; name a file of log.request_dump.") from None
    if head.version != VERSION:
        raise ConfigError(f"{file} has version {head.version} of the format, and this frame reads {VERSION}; use the frame that wrote it.")
    return head


def _find_fault(line: RecordedSequence, head: DumpHead) -> str | None:
    """What contradicts itself in a line that has the right types."""
    if max(line.num_prompt, line.num_output) > MAX_TOKENS or not line.num_prompt:
        return f"num_prompt or num_output is not from 1 to {MAX_TOKENS}"
    if head.content == "full" and (line.prompt is None or line.output is None):
        return "prompt or output is missing"
    if head.content == "shapes" and (line.prompt is not None or line.output is not None):
        return "a dump of shapes has a prompt or an output"
    if line.prompt is not None and len(line.prompt) != line.num_prompt:
        return f"prompt has {len(line.prompt)} tokens, and num_prompt is {line.num_prompt}"
    if line.output is not None and len(line.output) != line.num_output:
        return f"output has {len(line.output)} tokens, and num_output is {line.num_output}"
    if len(line.blocks) * head.block > line.num_prompt:
        return f"blocks has {len(line.blocks)} entries, more than the prompt has blocks"
    if (line.first is None) != (line.last is None) or (line.first or 0.0) > (line.last or 0.0):
        return "first is after last"
    if problems := line.params.problems():
        return problems[0].sentence
    return None
