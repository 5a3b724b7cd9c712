"""Lines of the files of a batch: requests that are checked, and results that are found again. Used
by the batch runner. Must not depend on the engine."""

from __future__ import annotations

import logging
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

import msgspec

from frame.entrypoints.http.batch.folder import private
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.bodies import problem_of
from frame.entrypoints.http.protocol.fields import check_spelling, ignored_header
from frame.entrypoints.http.validation_errors import repeated_error, repeated_name, type_name

_log = logging.getLogger(__name__)

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations"]
PRIORITY = -1000  # of a line without a priority
BLOCK_BYTES = 64 * 1024  # of an input file, read at a time: a thread holds the interpreter's lock for about 3 ms
MAX_LINE_BYTES = 32 * 1024 * 1024
MAX_RESULT_BYTES = 256 * 1024 * 1024  # of a line of an output file, to be read
MAX_LINE_VALUES = 1024 * 1024  # JSON values of a line; the route of its request may accept fewer
FIELDS = ("custom_id", "method", "url", "body")  # of a line
MAX_NAME = 512  # characters of a line's custom_id
MAX_FAULTS = 100  # lines that are no requests, after which no more are read


class LineFault(msgspec.Struct):
    """Why a line of the input file is not a request. `line`: its number from 1, without empty
    ones."""

    line: int
    code: str
    message: str


class InvalidInputError(Exception):
    """The input file of a batch cannot be run. The message is for the client."""


class LineReader:
    """The lines of a file with at most `max_requests` lines and as many empty ones, after a byte
    order mark if there is one. A context manager; the file is opened by the first read."""

    def __init__(self, path: Path, max_requests: int) -> None:
        self._path = path
        self._max_requests = max_requests
        self._file: BinaryIO | None = None
        self._rest = bytearray()  # the beginning of a line
        self._num_lines = self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def read_block(self) -> list[bytes] | None:
        """The lines that end in the next block, without empty ones. None: the file has ended.
        Raises InvalidInputError, OSError."""
        if self._file is None:
            try:
                self._file = open(self._path, "rb", opener=private)  # noqa: SIM115 - closed by `__exit__`
            except FileNotFoundError:
                raise InvalidInputError("its input file has been deleted; upload it again") from None
            if self._file.read(len(BOM_UTF8)) != BOM_UTF8:
                self._file.seek(0)
        block = self._file.read(BLOCK_BYTES)
        if not block and not self._rest:
            return None
        self._num_lines += block.count(b"\n")  # before the block is split, because lines cost more than bytes
        if self._num_lines > 2 * self._max_requests:
            raise InvalidInputError(f"the file has more than {self._max_requests} requests and as many empty lines; leave empty lines out")
        *lines, rest = block.split(b"\n") if block else (b"", b"")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if max(len(self._rest), len(lines[0]) if lines else 0) > MAX_LINE_BYTES:
            raise InvalidInputError(f"a line is longer than {MAX_LINE_BYTES} bytes; send less in one request")
        lines = [line for line in lines if line and not line.isspace()]
        self._num_requests += len(lines)
        if self._num_requests > self._max_requests:
            remedy = "split it, or start the server with a larger --batch-max-requests"
            raise InvalidInputError(f"the file has more than {self._max_requests} requests; {remedy}")
        return lines


class LineError(InvalidInputError):
    """A sentence for the client about a line."""

    def __init__(self, sentence: str, code: str = "invalid_request") -> None:
        super().__init__(sentence)
        self.code = code


class InvalidLinesError(Exception):
    """Lines of the file are no requests of the batch."""

    def __init__(self, faults: list[LineFault]) -> None:
        super().__init__()
        self.faults = faults


class Validator:
    """Checks the lines of a file before the first one runs."""

    def __init__(self, endpoint: str) -> None:
        self.num_lines = 0
        self.faults: list[LineFault] = []
        self._endpoint = endpoint
        self._names: set[int] = set()  # hashes of the lines' custom_ids

    def check_lines(self, lines: list[bytes] | None) -> bool:
        """Check the lines of a block; whether to read on."""
        for line in lines or ():
            self.num_lines += 1
            try:
                name = hash(parse_line(line, self._endpoint)[0])
                if name in self._names:
                    raise LineError("another line has this custom_id; give each line its own", "duplicate_custom_id")
                self._names.add(name)
            except LineError as error:
                self.faults.append(LineFault(self.num_lines, error.code, str(error)))
                if len(self.faults) >= MAX_FAULTS:
                    return False
        return lines is not None


class _Result(msgspec.Struct):
    """What is read of a line of an output file."""

    custom_id: str


_result_decoder = msgspec.json.Decoder(_Result)


def read_results(path: Path) -> set[str]:
    """The `custom_id`s of the lines of an output file. Raises OSError."""
    names = set()
    with open(path, "rb", opener=private) as file:
        for line in _whole_lines(file):
            try:
                names.add(_result_decoder.decode(line).custom_id)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                _log.warning("a line of %s is no result; its request is sent again", path.name)
    return names


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, without those that are too long."""
    while line := file.readline(MAX_RESULT_BYTES):
        is_whole = line.endswith(b"\n")
        if is_whole:
            yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_RESULT_BYTES)


def parse_line(line: bytes, endpoint: str) -> tuple[str, bytes, str]:
    """(custom_id, body, names of fields beside it that are ignored) of a line. Raises
    LineError."""
    problem = problem_of(line, MAX_LINE_VALUES)
    if problem is not None:
        raise LineError(problem)
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        sentence = f"the line is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
        raise LineError(sentence, "invalid_json_line") from None
    if not isinstance(fields, dict):
        raise LineError(f"the line is {type_name(fields)}; send an object")
    name = fields.get("custom_id")
    if name is None:
        raise LineError("custom_id is missing; give each line its own", "missing_custom_id")
    if not isinstance(name, str):
        raise LineError(f"custom_id is {type_name(name)}; send a string")
    if len(name) > MAX_NAME:
        raise LineError(f"custom_id has {len(name)} characters; it may have {MAX_NAME}")
    url, body = fields.get("url"), fields.get("body")
    if fields.get("method", "POST") != "POST" or url != endpoint:
        raise LineError(f"method and url must be POST and {endpoint}, the endpoint of the batch", "mismatched_url")
    if not isinstance(body, dict):
        raise LineError("body: expected an object")
    for field in ("stream", "background"):
        if body.get(field):
            raise LineError(f"{field} is not supported in a batch; leave it out")
    if (repeated := repeated_name(line, fields)) is not None:
        raise LineError(repeated_error(repeated, "the line").message)
    try:
        unknown = check_spelling([each for each in fields if each not in FIELDS], FIELDS, owner="a line")
    except ApiError as error:
        raise LineError(error.message) from None
    return name, msgspec.json.encode({"priority": PRIORITY, **body}), ignored_header(unknown)[1].decode()
