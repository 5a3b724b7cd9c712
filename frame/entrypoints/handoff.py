"""A stream's `Handoff`: what a server needs to continue the HTTP stream that another server began,
and the frames in which a server gives the router that state.

The router asks for frames with a signed header, keeps their records, and sends them with the
original request to another server. The fleet key (`FRAME_FLEET_KEY`) signs both, so that no client
can forge either. Used by the HTTP server and the router. Must not know a transport or a dialect.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from frame.core.errors import ConfigurationError
from frame.core.messages import Finish, TokenLogprobs

KEY_VARIABLE = "FRAME_FLEET_KEY"
MIN_KEY_LENGTH = 16  # characters
VERSION = 1  # of the header, the frames and the handoff
HEADER = b"x-frame-handoff"  # of a request: the router's signature; of a response: its body is frames
FLEET = b"x-frame-fleet"  # of /health: the server's instance, identity and version of the handoff
LOAD = b"x-frame-load"  # of /health: seconds between two tokens of a stream, lately
KV_EVENTS = b"x-frame-events"  # of /health: the ports of KV events and of replays (0: none), and the number of caches
MAX_HANDOFF = 8 << 20  # bytes of a handoff
MAX_BODY = 64 << 20  # bytes of a frame's body
VALIDITY = 60.0  # seconds in which a signature is accepted; the clocks of the hosts may differ by as much
MAX_NONCES = 1 << 16  # handoffs that a server accepts in that time

_HEAD = struct.Struct(">BII")  # kind, bytes of the record, bytes of the body
# Kinds of frames. START: the record is a `StreamStart`. EVENTS: the record has the `Write`s whose
# events are the body. PIECE: a body without a record. END: the body ends the stream. DRAINING: the
# server asks for a move.
START, EVENTS, PIECE, END, DRAINING = range(5)


class HandoffError(Exception):
    """A handoff is refused, with this HTTP status and sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class StreamStart(msgspec.Struct, frozen=True, array_like=True):
    """What is decided before the first token. rid: the request's name. created: Unix seconds.
    seeds: of each sequence. digest: of the prompts' token ids and adapters. fingerprint: OpenAI's
    `system_fingerprint`; "": the response has none."""

    rid: str
    created: float
    seeds: list[int]
    digest: bytes
    weight_version: str
    fingerprint: str = ""


class Write(msgspec.Struct, frozen=True, array_like=True):
    """The new output of one sequence in an event. cached, accepted, rejected: totals of prompt
    tokens from the prefix cache and of drafted tokens. weight_version: "" where it is that of the
    write before."""

    index: int
    token_ids: list[int]
    cached: int
    accepted: int = 0
    rejected: int = 0
    weight_version: str = ""
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: TokenLogprobs | None = None


class Handoff(msgspec.Struct, frozen=True, tag="handoff", kw_only=True):
    """The state of a stream. identity: of the server that began it. age: seconds since the request
    came. records: of the frames EVENTS, in order, each with one `Write` or more."""

    version: int
    identity: str
    age: float
    start: StreamStart
    records: list[list[Write]]


class SealedHandoff(msgspec.Struct, frozen=True, tag="handoff", kw_only=True):
    """A `Handoff` as the router makes it: start and records as they came, the records in a list."""

    version: int
    identity: str
    age: float
    start: msgspec.Raw
    records: msgspec.Raw


class _RawRecords(msgspec.Struct, frozen=True, tag="handoff", kw_only=True):
    """A `Handoff` whose records are not read yet."""

    version: int
    identity: str
    age: float
    start: StreamStart
    records: list[msgspec.Raw]


class _AnyVersion(msgspec.Struct):
    version: int


TURN = 2000  # records that are read at once
_encode = msgspec.msgpack.encode
_decode_record = msgspec.msgpack.Decoder(list[Write]).decode


def frame(kind: int, record: bytes = b"", body: bytes = b"") -> bytes:
    """One frame."""
    return b"".join((_HEAD.pack(kind, len(record), len(body)), record, body))


class FrameReader:
    """Splits the bytes of a response into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        """(kind, record, body) of each frame that is complete. Raises ValueError for what is no
        frame."""
        self._data += data
        at = 0
        try:
            while len(self._data) - at >= _HEAD.size:
                kind, record_length, body_length = _HEAD.unpack_from(self._data, at)
                if kind > DRAINING or record_length > MAX_HANDOFF or body_length > MAX_BODY:
                    raise ValueError("the response has a frame of an unknown kind or size")
                middle = at + _HEAD.size + record_length
                end = middle + body_length
                if len(self._data) < end:
                    return
                record, body = bytes(self._data[at + _HEAD.size : middle]), bytes(self._data[middle:end])
                at = end
                yield kind, record, body
        finally:
            del self._data[:at]


@dataclass(frozen=True, slots=True)
class Signature:
    """The fields of the header. length: bytes of the handoff before the request's body; 0: there is
    none, and the router asks for frames."""

    nonce: str
    expires: int  # Unix seconds
    length: int
    code: str


class FleetKey:
    """The secret of the router and its servers."""

    def __init__(self, key: str) -> None:
        self._key = hashlib.sha256(b"frame-fleet" + key.encode()).digest()
        self._nonces: dict[str, int] = {}  # of accepted handoffs: when they expire, oldest first

    def sign(self, path: str, target: str = "", handoff: bytes = b"", body: bytes = b"") -> bytes:
        """The value of the header for a request to `path`. target: the instance that may accept the
        handoff."""
        nonce, expires = secrets.token_hex(8), int(time.time() + VALIDITY)
        code = self._code(path, target, nonce, expires, handoff, body)
        return f"{VERSION}.{nonce}.{expires}.{len(handoff)}.{code}".encode()

    def read(self, value: bytes) -> Signature:
        """The fields of a header, which are not checked yet but for the version, time and length.
        Raises HandoffError."""
        try:
            version, nonce, expires, length, code = value.decode("ascii").split(".")
            if int(version) != VERSION:
                sentence = f"{HEADER.decode()} has version {int(version)}, and this server has {VERSION}; run the same release of frame"
                raise HandoffError(409, sentence)
            signature = Signature(nonce, int(expires), int(length), code)
        except ValueError:
            raise HandoffError(400, f"{HEADER.decode()} is for the router of a fleet; leave it out") from None
        if not 0 <= signature.length <= MAX_HANDOFF:
            raise HandoffError(400, f"{HEADER.decode()} names a handoff of {signature.length} bytes; it may have {MAX_HANDOFF}")
        if abs(signature.expires - VALIDITY - time.time()) > VALIDITY:
            raise HandoffError(403, f"{HEADER.decode()} has expired; set the clocks of the router and of this server")
        return signature

    def check(self, signature: Signature, path: str, target: str = "", handoff: bytes = b"", body: bytes = b"") -> None:
        """Raise HandoffError unless the key made the signature, and for a handoff that came
        before."""
        code = self._code(path, target, signature.nonce, signature.expires, handoff, body)
        if not hmac.compare_digest(code.encode(), signature.code.encode()):
            sentence = "is not signed with this server's fleet key for this request and process"
            raise HandoffError(403, f"{HEADER.decode()} {sentence}; only its router may send it")
        if handoff:
            now = time.time()
            while self._nonces and (oldest := next(iter(self._nonces.items())))[1] + VALIDITY < now:
                del self._nonces[oldest[0]]
            if signature.nonce in self._nonces:
                raise HandoffError(409, "this handoff was accepted before; it is not accepted twice")
            if len(self._nonces) >= MAX_NONCES:
                raise HandoffError(503, f"more than {MAX_NONCES} handoffs came within {2 * VALIDITY:g} s; try again later")
            self._nonces[signature.nonce] = signature.expires

    def _code(self, path: str, target: str, nonce: str, expires: int, handoff: bytes, body: bytes) -> str:
        head = _encode((VERSION, path, target, nonce, expires, len(handoff)))
        digests = hashlib.sha256(handoff).digest() + hashlib.sha256(body).digest() if handoff else b""
        return hmac.digest(self._key, head + digests, "sha256").hex()


def read_fleet_key() -> FleetKey | None:
    """The key of the environment; None without one. Raises ConfigurationError for a short one."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        return None
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigurationError(
            f"{KEY_VARIABLE} has {len(key)} characters, and a secret has at least {MIN_KEY_LENGTH};"
            f" export {KEY_VARIABLE}=$(openssl rand -hex 32), the same for the router and all servers"
        )
    return FleetKey(key)


def decode_handoff(data: bytes) -> Handoff:
    """The handoff of signed bytes. Raises HandoffError for another version, or what is none."""
    return next(decoded for decoded in decode_in_turns(data) if decoded is not None)


def decode_in_turns(data: bytes) -> Iterator[Handoff | None]:
    """The same in turns of some milliseconds, so that an event loop serves others between them: a
    long response has 100,000 records. Yields None after a turn, at last the handoff."""
    try:
        version = msgspec.msgpack.decode(data, type=_AnyVersion).version
        if version != VERSION:
            raise HandoffError(409, f"the handoff has version {version}, and this server has {VERSION}; run the same release of frame")
        raw, records = msgspec.msgpack.decode(data, type=_RawRecords), list[list[Write]]()
        for start in range(0, len(raw.records), TURN):
            records += [_decode_record(record) for record in raw.records[start : start + TURN]]
            yield None
        yield Handoff(version=version, identity=raw.identity, age=raw.age, start=raw.start, records=records)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise HandoffError(400, "the handoff cannot be read; the router and this server differ in their release of frame") from None
