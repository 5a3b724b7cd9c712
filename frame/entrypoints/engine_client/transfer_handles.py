"""Requests that a prefill server begins and a decode server continues, and handles of them.

A handle is an object with vLLM's names of fields. It is signed with the secret of the servers, for
one prompt of one tenant. Used by the HTTP routes, which call it `kv_transfer_params`. Must not know
how blocks are moved.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from frame.core.interfaces.kv_tier import KVTransfer
from frame.core.messages import as_array
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.host.authenticated_link import KEY_VARIABLE, read_key

NAME = "kv_transfer_params"
# The fields of a handle besides its signature. `remote_block_ids`: places of blocks in the prompt.
FIELDS = (
    *("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"),
    *("first_token_ids", "seed", "cached_tokens", "weight_version"),
)
log = logging.getLogger(__name__)


def prepare_transfer(
    mode: str | None,
    params: Mapping[str, Any],
    state: RequestState,
    namespace: str,
    *,
    version: str,
    page_size: int,
    min_tokens: int,
) -> None:
    """Let the engine keep or expect the blocks of a request's prompt, as `params` asks. mode,
    version: of the server and of its weights. min_tokens: fewer are not kept. Raises
    InvalidRequestError for what this server cannot do, and for handles that are not of its
    peers."""
    begins = bool(params.get("do_remote_decode"))
    if begins and params.get("do_remote_prefill"):
        raise InvalidRequestError(f"{NAME} has do_remote_decode and do_remote_prefill; send one of them", NAME)
    needed = "prefill" if begins else "decode"
    if mode != needed:
        field = f"{NAME}.do_remote_{'decode' if begins else 'prefill'}"
        raise InvalidRequestError(f"{field} needs a server with --disaggregation-mode {needed}; leave it out", field)
    if (reason := _find_obstacle(state)) is not None:
        raise InvalidRequestError(f"{reason}, and such a request is computed whole by one server; leave {NAME} out", NAME)
    sequence = state.sequences[0]
    if not begins:
        _expect_blocks(params, sequence, namespace, version)
        return
    num_blocks = len(sequence.prompt) // page_size
    if num_blocks * page_size >= min_tokens:
        sequence.recovery.transfer = KVTransfer(secrets.token_hex(16), num_blocks=num_blocks)


def describe_transfer(state: RequestState, server: Mapping[str, Any]) -> dict[str, Any] | None:
    """The handle of a request that this prefill server has begun; None for one whose blocks are not
    kept. server: the fields that name it and its weights."""
    sequence = state.sequences[0]
    transfer, finish = sequence.recovery.transfer, sequence.finish
    if transfer is None or finish is None or finish.reason == "abort":
        return None
    can_continue = finish.reason == "length" or sequence.num_tokens > 1
    handle = {
        **server,
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_request_id": transfer.lease,
        "remote_block_ids": list(range(transfer.num_blocks)),
        "first_token_ids": sequence.recovery.output_ids[:1].tolist() if can_continue else [],
        "seed": sequence.params.seed,
        "cached_tokens": sequence.cached,
    }
    return {**handle, "signature": sign_handle(handle, sequence.prompt, state.namespace)}


def sign_handle(handle: Mapping[str, Any], prompt: list[int], namespace: str) -> str:
    """The signature of a handle, for a prompt in a namespace of the prefix cache."""
    digest = hashlib.blake2b(as_array(prompt).tobytes(), digest_size=32).digest()
    message = msgspec.msgpack.encode([namespace, digest, [handle.get(name) for name in FIELDS]])
    return hmac.new(read_key("disaggregation.mode", "server"), message, hashlib.sha256).hexdigest()


def _find_obstacle(state: RequestState) -> str | None:
    """Why a request cannot be divided between two servers; None: it can."""
    sequence = state.sequences[0]
    if len(state.sequences) != 1:
        return f"the request asks for {len(state.sequences)} sequences (prompts x n)"
    if sequence.params.prompt_logprobs is not None:
        return "the request asks for log-probabilities of the prompt"
    if sequence.recovery.media:
        return "the prompt has media"
    return None if sequence.recovery.adapter is None else "the request uses an adapter"


def _expect_blocks(handle: Mapping[str, Any], sequence: SequenceState, namespace: str, version: str) -> None:
    """What a prefill server has computed, for a decode server."""
    signature = sign_handle(handle, sequence.prompt, namespace)
    if not hmac.compare_digest(signature.encode(), (handle.get("signature") or "").encode()):
        sentence = f"{NAME} was not issued to this API key for this prompt by a server with the same {KEY_VARIABLE}"
        raise InvalidRequestError(f"{sentence}; send what the prefill server returned, unchanged, or leave it out", NAME)
    host, port = handle["remote_host"], handle["remote_port"]
    if handle["weight_version"] != version:
        theirs = handle["weight_version"]
        log.warning(
            "the prefill server %s:%s has the weights %s and this server has the weights %s; the prompt is computed again",
            *(host, port, theirs, version),
        )
        return
    recovery = sequence.recovery
    recovery.transfer = KVTransfer(handle["remote_request_id"], host, port, len(handle["remote_block_ids"]))
    recovery.num_cached = sequence.cached = handle["cached_tokens"]
    sequence.params = msgspec.structs.replace(sequence.params, seed=handle["seed"])
    params = sequence.params
    # A client may send the handle with other parameters: what limits tokens is applied to the first
    # one here, which gives the same token where the parameters are the same.
    if params.logprobs is None and params.grammar is None and not (params.logit_bias or params.bad_words_ids):
        recovery.first_ids = handle["first_token_ids"]
