"""What the router reads of a request: the beginning of its prompt, and whether it may be repeated.
Pure. Must not know a replica."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from typing import Any, NamedTuple

import msgspec

BLOCK = 256  # bytes of a prompt that are compared together
MAX_BYTES = 64 * 1024  # of a prompt
MAX_READ_LENGTH = 8 << 20  # bytes of a body that is looked through; a longer one holds the event loop for 0.1 s
_BEFORE = ("model", "lora_path", "cache_salt", "system", "instructions", "tools")  # fields that precede the prompt in the template
_PROMPTS = ("messages", "prompt", "input_ids", "text", "input", "inputs", "texts", "query", "content", "message")
# Values stay as they came: to decode 64 MiB of JSON would hold the event loop for seconds.
_FIELDS = msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in _BEFORE + _PROMPTS])
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_DECODER = msgspec.json.Decoder(_FIELDS)
# Routes that keep nothing on the server: a request that sent no byte of an answer may be repeated.
_STATELESS = frozenset(
    f"/{path}"
    for path in (
        "generate", "classify", "embed", "rerank", "score", "pooling", "tokenize", "detokenize", "invocations", "parse_function_call",
        "separate_reasoning", "api/chat", "api/generate", "api/embed", "api/show", "v1/chat/completions", "v1/chat/completions/batch",
        "v1/chat/completions/render", "v1/completions", "v1/completions/render", "v1/embeddings", "v1/classify", "v1/rerank",
        "v1/score", "v1/tokenize", "v1/detokenize", "v1/messages", "v1/messages/count_tokens", "v1/moderations",
        "v1/responses/input_tokens", "get_weight_version", "v1/audio/transcriptions", "v1/audio/translations", "v2/embed", "v2/rerank",
        "v1/embed", "v1/chat", "v2/chat", "api/embeddings", "predict", "similarity", "embed_all", "",
    )
)  # fmt: skip
# On the first replica that is there: a batch reads a file, and a session is closed where it was
# opened.
_PINNED = ("/v1/files", "/v1/batches", "/open_session", "/close_session")
# Objects that one replica stores. A replica that lacks one answers 404.
_STORED = ("/v1/responses", "/v1/conversations", *_PINNED)
# Those that change the engine's state or weights, which may take minutes
STATES = frozenset(
    ("/pause_generation", "/continue_generation", "/release_memory_occupation", "/resume_memory_occupation", "/pause", "/resume",
     "/sleep", "/wake_up", "/update_weights_from_disk",
     "/transfer_weights", "/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed",
     "/update_weights_from_tensor", "/begin_weight_update", "/end_weight_update", "/finish_weight_update", "/cancel_weight_update",
     "/init_weight_transfer_engine", "/start_weight_update", "/update_weights")
)  # fmt: skip
BROADCAST = STATES | frozenset(
    ("/abort_request", "/flush_cache", "/reset_prefix_cache", "/check_integrity", "/start_profile", "/stop_profile",
     "/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
)  # fmt: skip


def is_repeatable(method: str, path: str) -> bool:
    """Whether a request whose answer has not begun may be sent to another replica."""
    return method in ("GET", "HEAD", "OPTIONS") or path in _STATELESS


def is_stored(path: str) -> bool:
    """Whether the request may concern an object that another replica has."""
    return path.startswith(_STORED)


def is_pinned(path: str) -> bool:
    """Whether the request goes to the first replica that is there."""
    return path.startswith(_PINNED)


def is_streamed(body: bytes) -> bool:
    """Whether a JSON body asks for a stream; a guess, which costs little."""
    return len(body) <= MAX_READ_LENGTH and _STREAM.search(body) is not None


class Prompt(NamedTuple):
    """What the choice of a replica reads of a body. blocks: a hash of each prefix of whole blocks
    of the prompt; empty without one. model: what names the model or the adapter, as it came; b"":
    nothing. length: bytes of the prompt and what precedes it; 0: there are several prompts."""

    blocks: list[int]
    model: bytes
    length: int = 0


def read_prompt(body: bytes, adapters: Container[bytes] = ()) -> Prompt:
    """The prompt in a JSON body. An adapter, one of `adapters` or a path, counts as a block before
    it."""
    if len(body) > MAX_READ_LENGTH:
        return Prompt([], b"")
    try:
        fields: Any = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt([], b"")  # the replica refuses the body
    path, name = bytes(fields.lora_path), bytes(fields.model)
    is_adapter = name in adapters
    if path not in (b"", b"null", b'""'):
        is_adapter, name = True, path
    before, prompts = ([memoryview(getattr(fields, field)) for field in names] for names in (_BEFORE, _PROMPTS))
    prompt = next((value for value in prompts if value and value != b"null"), None)
    if prompt is None:
        return Prompt([], name)
    length = 0 if prompt[:2] in (b"[[", b'["') else sum(map(len, before)) + len(before) + len(prompt)
    if prompt[:2] == b"[[":  # the first of several
        prompt = prompt[1:]
    text = b",".join([each[:MAX_BYTES] for each in (*before, prompt)])[:MAX_BYTES]
    digest, hashes = hashlib.blake2b(digest_size=8), []
    if is_adapter:
        hashes.append(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        digest.update(text[start : start + BLOCK])
        hashes.append(int.from_bytes(digest.digest(), "little"))
    return Prompt(hashes, name, length)
