"""The policy for fields of request bodies: each is implemented, refused by name, or reported as
ignored. `parse_body` applies it to every route; docs/http_api.md states it for users.

In the objects inside a body, a name is compared once for each kind of object, so a long
conversation costs one check of its keys for each object. Must not know a route or an engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias

from frame.entrypoints.http.errors import ApiError

IGNORED = b"x-frame-ignored-fields"
MAX_UNKNOWN = 16  # unknown names that are compared with known ones, which takes time
CLOSENESS = 0.85  # of an unknown name to a known one, from 0 to 1, from which it is taken for a spelling mistake
MIN_SWAPPED, MIN_ALTERED = 4, 5  # characters of a known name that is taken to be meant with two letters swapped; with another letter
OF_OTHERS = frozenset({"top_a"})  # of other servers' clients, and one letter from a known name
MAX_NAME = 64  # characters of a name that a response quotes
_MAX_PATH = 2 * MAX_NAME
_UNPRINTABLE = re.compile(r"[^][A-Za-z0-9_.-]")

WITHOUT_EFFECT = frozenset({
    "user", "metadata", "store", "conversation_id", "safety_identifier", "prediction", "prompt_cache_options", "client_metadata",
    "guided_decoding_backend",  # every backend accepts the same outputs
})  # fmt: skip

_HERE = ""  # another route implements it

# Fields of peers' request classes, by what to send instead in a route that does not implement them,
# or why they are refused.
_REMEDIES = {
    "this server responds with text": "modalities audio",
    "the server's setting media.processor_options says it (--mm-processor-kwargs)": """
        video_config use_audio_in_video max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config
        media_io_kwargs mm_processor_kwargs
    """,
    "files are told apart by their content; leave it out": "mm_hashes mm_content_hashes",
    "this server has one engine, and requests are not routed": """
        bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank
        disagg_prefill_dp_rank kv_router_hint routing_key http_worker_ipc encoder_urls need_wait_for_mm_inputs num_items_assigned
        ec_transfer_params
    """,
    "/v1/chat/completions and /v1/completions of prefill and decode servers take it": "kv_transfer_params",
    "this server does not return it": """
        return_mm_kwargs return_routed_experts routed_experts_start_len routed_experts_prompt_start return_cached_tokens_details
        return_meta_info return_indexer_topk return_sampling_mask return_entropy return_flat_raw_top_logprobs
        return_flat_raw_top_logprobs_b64 return_prompt_text return_token_offsets return_bytes
        return_pooled_hidden_states enable_response_messages
    """,
    _HERE: """
        model messages prompt text input input_ids image_data video_data audio_data
        sampling_params system instructions max_tokens max_completion_tokens
        max_output_tokens max_new_tokens n best_of suffix echo stream stream_options stop stop_sequences logprobs top_logprobs
        prompt_logprobs seed temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias min_tokens
        ignore_eos stop_token_ids bad_words skip_special_tokens spaces_between_special_tokens include_stop_str_in_output no_stop_trim
        regex ebnf json_schema structural_tag response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
        guided_whitespace_pattern
        stop_regex custom custom_params tools tool_choice parallel_tool_calls functions function_call reasoning_effort
        thinking thinking_token_budget stream_interval token_ids_logprob logprob_token_ids
        num_speculative_tokens documents chat_template_kwargs continue_final_message add_generation_prompt add_special_tokens
        separate_reasoning return_token_ids return_prompt_token_ids return_tokens_as_token_ids truncate_prompt_tokens truncation_side
        truncation service_tier return_logprob logprob_start_len top_logprobs_num return_text_in_logprobs background include
        previous_response_id max_tool_calls output_config priority cache_salt timeout rid request_id
        session_id prompt_cache_key prompt_cache_retention cache_control return_hidden_states
    """,
    "start the server with the template (--chat-template)": "chat_template",
    "beam search is not implemented; use n": "use_beam_search",
    "beam search is not implemented": "length_penalty early_stopping",
    "use logit_bias or a grammar": "allowed_token_ids",
    "use repetition_penalty or frequency_penalty": "repetition_detection",
    "leave it out": """
        watermarking task ngram_corpus_id custom_labels received_time container context_management item_first
    """,
    "use truncate_prompt_tokens": "truncate truncation_direction",
    "use thinking_token_budget": "max_thinking_tokens",
    "use reasoning_effort": "require_reasoning reasoning",
    "use separate_reasoning, or reasoning_effort none": "include_reasoning",
    "thinking is streamed as it comes; leave it out": "stream_reasoning",
    "say it in a message": "verbosity",
    "use tools for what your program looks up": "web_search_options",
    "use /v1/moderations": "moderation",
    "send text or token ids": """
        prompt_embeds input_embeds positional_embed_overrides embed_overrides query_embed_overrides item_embed_overrides
        embed_override_token_id
    """,
    "send several inputs": "multi_item_delimiter_indices",
    "name the adapter in model": "lora_path lora_id",
    "use /generate, or send the conversation; its prefix is cached": "session_params",
    "requests bring no code; use a logits-processor plugin and custom": "custom_logit_processor logits_processors",
    "use custom": "vllm_xargs",
    "use cache_salt": "extra_key",
    "send the header traceparent": "external_trace_header",
    "every request is counted": "log_metrics",
    "the log holds no texts; leave it out": "no_logs",
    "use previous_response_id, or send the conversation as input": "previous_input_messages previous_response",
    "use tools of your own": "mcp_servers",
    "the checkpoint says it": "normalize use_activation",
    "use use_activation": "softmax activation apply_softmax",
    "send floats, or use encoding_format of /v1/embeddings": "embed_dtype",
    "vectors are little-endian": "endianness",
    "the server's setting model.label_tokens says it": "label_token_ids",
    "use instruction": "instruct",
    "use max_tokens_per_doc of a rerank route": "max_chunks_per_doc max_tokens_per_doc",
    "send each document as text": "rank_fields",
}
REFUSED: Mapping[str, str] = {name: remedy for remedy, names in _REMEDIES.items() for name in names.split()}

_TRUE_BY_DEFAULT = (
    "return_mm_kwargs", "include_reasoning", "stream_reasoning", "separate_reasoning", "add_generation_prompt", "add_special_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "log_metrics", "normalize", "softmax", "use_activation",
)  # fmt: skip
# Of these, the ones with which false asks for something.
FALSE_ASKS = frozenset({"include_reasoning", "add_special_tokens", "normalize", "softmax", "use_activation"})
EMPTY_ASKS: tuple[str, object] = ("web_search_options", {})  # an empty object asks for a search
# Values, besides null, false and empty ones, with which a refused field asks for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("length_penalty", "n", "best_of", "stream_interval"), (1,)),
    **dict.fromkeys(("routed_experts_start_len", "routed_experts_prompt_start", "routed_dp_rank", "data_parallel_rank"), (0,)),
    **dict.fromkeys(_TRUE_BY_DEFAULT, (True,)),
    "priority": (0,),
    "thinking_token_budget": (-1,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default", "standard_only"),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "truncation": ("disabled",),
    "tool_choice": ("none", "auto"),
    "truncate": ("NONE",),
    "truncation_direction": ("right", "Right"),
    "model": ("default",),
}


def check_fields(known: Iterable[str], body: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a JSON object that are not `known` and are ignored. Raises ApiError 400 for a
    name that may not be ignored."""
    unknown = body.keys() - known
    if not unknown:
        return ()
    ignored = []
    for name in (name for name in body if name in unknown):  # in the client's order
        if name in WITHOUT_EFFECT:
            continue
        if name in REFUSED:
            _refuse(name, body[name])
        else:
            ignored.append(name)
    return check_spelling(ignored, known)


def ignored_header(names: Iterable[str]) -> tuple[bytes, bytes]:
    """The response header that lists the ignored fields."""
    return IGNORED, ", ".join(_UNPRINTABLE.sub("?", name[:_MAX_PATH]) for name in names).encode()


def _refuse(name: str, value: Any) -> None:
    """Raise ApiError 400 unless the value asks for nothing."""
    if value is None or (value is False and name not in FALSE_ASKS) or (value in ("", [], {}) and (name, value) != EMPTY_ASKS):
        return
    if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ())):
        return
    remedy = REFUSED[name]
    if remedy == _HERE:
        raise ApiError(400, f"{name} is not a field of this route; leave it out", name)
    raise ApiError(400, f"{name} is not supported; {remedy}", name)


def check_spelling(names: list[str], known: Iterable[str], kind: str = "field", owner: str = "this route") -> tuple[str, ...]:
    """The names, none of which is close to a known one. Raises ApiError 400."""
    if len(names) > MAX_UNKNOWN:
        place = "body" if kind == "field" else "request"
        raise ApiError(400, f"the {place} has {len(names)} unknown {kind}s; it may have {MAX_UNKNOWN}", names[0][:MAX_NAME])
    for name in names:
        if len(name) <= MAX_NAME and (close := find_meant(name, known)) is not None:
            raise ApiError(400, f"{name} is no {kind} of {owner}; did you mean {close}?", name)
    return tuple(names)


def find_meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one misspells: in other case, with hyphens, with one letter
    more, fewer or other, with two letters swapped, or at least as similar as `CLOSENESS`."""
    spelt = name.lower().replace("-", "_")
    if spelt in OF_OTHERS:
        return None
    for other in known:
        if spelt == other or _is_altered(spelt, other):
            return other
    close = get_close_matches(spelt, known, n=1, cutoff=CLOSENESS)
    return close[0] if close else None


def _is_altered(name: str, known: str) -> bool:
    """Whether two neighbours are swapped, or one letter is another one."""
    if len(name) != len(known) or len(known) < MIN_SWAPPED:
        return False
    places = [i for i, (one, other) in enumerate(zip(name, known, strict=True)) if one != other]
    if len(places) == 1:
        return len(known) >= MIN_ALTERED
    swapped = len(places) == 2 and places[1] == places[0] + 1
    return swapped and name[places[0]] == known[places[1]] and name[places[1]] == known[places[0]]


def check_nested_fields(place: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ApiError 400 for a field of the nested object `place` that is not `known`; null and
    false are ignored.

    Nested objects have no list of ignored fields, so every unknown field is refused by its path.
    """
    for name, value in fields.items():
        if name in known or value is None or value is False:
            continue
        shown = name[:MAX_NAME]
        close = get_close_matches(shown.lower(), known, n=1, cutoff=CLOSENESS)
        remedy = f"did you mean {close[0]}?" if close else f"it may have {', '.join(known)}"
        raise ApiError(400, f"{place}.{shown} is not a known field; {remedy}", f"{place}.{shown}")


# objects inside a body ----------------------------------------------------------------------------


class Shape:
    """The fields of one kind of object. `names`: those that are known, in words. `nested`: field ->
    the shape of its value, an object or a list of objects. `unused`: known fields whose effect the
    server does not have; they are reported, and never taken for a spelling mistake."""

    __slots__ = ("names", "nested", "unused")

    def __init__(self, names: str, nested: Mapping[str, Shape] | None = None, unused: str = "") -> None:
        self.nested: dict[str, Shape] = dict(nested or {})
        self.names = frozenset([*names.split(), *self.nested])
        self.unused = frozenset(unused.split())


Place: TypeAlias = "tuple[Place | None, str | int]"  # (the object or list around it, the name or index in that)
Unknown = dict[tuple[int, str], tuple[Place, Shape]]  # (id of the shape, name) -> (the first place, the shape)


def check_nested(shapes: Mapping[str, Shape], body: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths of fields inside a body that are ignored, the first place of each. Raises ApiError
    400 for one that may not be ignored."""
    unknown: Unknown = {}
    for name, shape in shapes.items():
        if isinstance(value := body.get(name), dict | list):
            _search(shape, value, (None, name), unknown)
    if not unknown:
        return ()
    for (_, name), (place, shape) in unknown.items():
        if name in shape.unused or len(name) > MAX_NAME:
            continue
        if close := get_close_matches(name.lower(), shape.names, n=1, cutoff=CLOSENESS):
            path = f"{_write(place)}.{name}"
            raise ApiError(400, f"{path} is not a known field; did you mean {close[0]}?", path)
    return tuple(f"{_write(place)}.{name[:MAX_NAME]}" for (_, name), (place, _) in unknown.items())


def _search(shape: Shape, value: Any, place: Place, unknown: Unknown) -> None:
    """Add the unknown names in an object, or in the objects of a list. Raises ApiError 400 for too
    many."""
    if isinstance(value, list):
        for i, each in enumerate(value):
            if isinstance(each, dict | list) and each:
                _search(shape, each, (place, i), unknown)
        return
    for name, each in value.items():
        if name not in shape.names:
            if (id(shape), name) not in unknown and not _asks_for_nothing(shape, name, each):
                unknown[id(shape), name] = (place, shape)
                if len(unknown) > MAX_UNKNOWN:
                    _refuse_count(unknown.values(), name)
        elif each and isinstance(each, dict | list) and (inner := shape.nested.get(name)) is not None:
            _search(inner, each, (place, name), unknown)


def _asks_for_nothing(shape: Shape, name: str, value: Any) -> bool:
    return value is None or (name in shape.unused and (value in ("", False) or value in NEUTRAL.get(name, ())))


def _write(place: Place) -> str:
    around, key = place
    if around is None:
        return str(key)
    return _write(around) + (f"[{key}]" if isinstance(key, int) else f".{key}")


def _refuse_count(places: Iterable[tuple[Place, Shape]], name: str) -> None:
    place = _write(next(iter(places))[0])
    sentence = f"the objects in the body have more than {MAX_UNKNOWN} unknown fields, such as {name[:MAX_NAME]}; leave them out"
    raise ApiError(400, sentence, place)
