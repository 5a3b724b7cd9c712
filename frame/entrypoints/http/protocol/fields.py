"""The policy for fields of request bodies: each is implemented, refused by name, or reported as
ignored. `parse_body` applies it to every route; docs/http_api.md states it for users.

Knows no route and no engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from frame.entrypoints.http.errors import ApiError

IGNORED = b"x-frame-ignored-fields"
MAX_UNKNOWN = 16  # unknown names that are compared with known ones, which takes time
CLOSENESS = 0.85  # of an unknown name to a known one, from 0 to 1, from which it is taken for a spelling mistake
_MAX_NAME = 64
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.-]")

WITHOUT_EFFECT = frozenset({
    "user", "metadata", "store", "session_id", "conversation_id", "safety_identifier", "prediction", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "cache_control",
})  # fmt: skip

_TEXT_ONLY = "this model takes text only"
_ONE_ENGINE = "this server has one engine, and requests are not routed"
_NOT_RETURNED = "this server does not return it"
_HERE = ""  # another route implements it

# Fields of peers' request classes -> why a route that does not implement them refuses them, or what
# to send instead.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("image_data", "video_data", "audio_data", "modalities", "mm_hashes", "mm_content_hashes", "video_config", "audio"),
                *("use_audio_in_video", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch"),
                *("images_config", "media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs"),
            ),
            _TEXT_ONLY,
        ),
        **dict.fromkeys(
            (
                *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "routed_dp_rank"),
                *("data_parallel_rank", "disagg_prefill_dp_rank", "kv_router_hint", "routing_key", "http_worker_ipc", "encoder_urls"),
                *("need_wait_for_mm_inputs", "num_items_assigned", "kv_transfer_params", "ec_transfer_params"),
            ),
            _ONE_ENGINE,
        ),
        **dict.fromkeys(
            (
                *("return_hidden_states", "return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start"),
                *("return_cached_tokens_details", "return_meta_info", "return_indexer_topk", "return_sampling_mask", "return_entropy"),
                *("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_prompt_text", "return_token_offsets"),
                *("return_bytes", "token_ids_logprob", "logprob_token_ids", "return_pooled_hidden_states", "enable_response_messages"),
            ),
            _NOT_RETURNED,
        ),
        **dict.fromkeys(
            (
                *("model", "messages", "prompt", "text", "input", "input_ids", "sampling_params", "system", "instructions"),
                *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n", "best_of", "suffix", "echo"),
                *("stream", "stream_options", "stop", "stop_sequences", "logprobs", "top_logprobs", "prompt_logprobs", "seed"),
                *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
                *("min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens"),
                *("include_stop_str_in_output", "no_stop_trim", "regex", "ebnf", "json_schema", "structural_tag", "response_format"),
                *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "custom", "custom_params"),
                *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort", "thinking"),
                *("num_speculative_tokens", "documents", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
                *("add_special_tokens", "separate_reasoning", "return_token_ids", "return_prompt_token_ids"),
                *("return_tokens_as_token_ids", "truncate_prompt_tokens", "truncation_side", "truncation", "service_tier"),
                *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs", "background", "include"),
                *("previous_response_id", "max_tool_calls", "output_config", "priority", "cache_salt", "timeout", "rid", "request_id"),
            ),
            _HERE,
        ),
        "chat_template": "start the server with the template (--chat-template)",
        "use_beam_search": "beam search is not implemented; use n",
        "length_penalty": "beam search is not implemented",
        "early_stopping": "beam search is not implemented",
        "allowed_token_ids": "use logit_bias or a grammar",
        "repetition_detection": "use repetition_penalty or frequency_penalty",
        "watermarking": "leave it out",
        "stop_regex": "use stop",
        "stream_interval": "events come as tokens come; leave it out",
        "thinking_token_budget": "use reasoning_effort, or max_tokens",
        "max_thinking_tokens": "use reasoning_effort, or max_tokens",
        "require_reasoning": "use reasoning_effort",
        "include_reasoning": "use separate_reasoning, or reasoning_effort none",
        "stream_reasoning": "thinking is streamed as it comes; leave it out",
        "reasoning": "use reasoning_effort",
        "verbosity": "say it in a message",
        "task": "leave it out",
        "web_search_options": "use tools for what your program looks up",
        "moderation": "use /v1/moderations",
        "prompt_embeds": "send text or token ids",
        "input_embeds": "send text or token ids",
        "positional_embed_overrides": "send text or token ids",
        "embed_overrides": "send text or token ids",
        "query_embed_overrides": "send text or token ids",
        "item_embed_overrides": "send text or token ids",
        "embed_override_token_id": "send text or token ids",
        "multi_item_delimiter_indices": "send several inputs",
        "lora_path": "this server has no adapters",
        "lora_id": "this server has no adapters",
        "session_params": "send the conversation; its prefix is cached",
        "custom_logit_processor": "requests bring no code; use a logits-processor plugin and custom",
        "logits_processors": "requests bring no code; use a logits-processor plugin and custom",
        "vllm_xargs": "use custom",
        "extra_key": "use cache_salt",
        "ngram_corpus_id": "leave it out",
        "custom_labels": "leave it out",
        "external_trace_header": "send the header traceparent",
        "received_time": "leave it out",
        "log_metrics": "every request is counted",
        "no_logs": "the log holds no texts; leave it out",
        "guided_decoding_backend": "the server's setting sampling.grammar says it",
        "guided_whitespace_pattern": "leave it out",
        "previous_input_messages": "use previous_response_id, or send the conversation as input",
        "previous_response": "use previous_response_id, or send the conversation as input",
        "container": "leave it out",
        "mcp_servers": "use tools of your own",
        "context_management": "leave it out",
        "normalize": "the checkpoint says it",
        "softmax": "the checkpoint says it",
        "activation": "the checkpoint says it",
        "use_activation": "the checkpoint says it",
        "apply_softmax": "the checkpoint says it",
        "embed_dtype": "use encoding_format",
        "endianness": "vectors are little-endian",
        "label_token_ids": "the server's setting model.label_tokens says it",
        "item_first": "leave it out",
        "instruct": "use instruction",
        "max_chunks_per_doc": "use truncate_prompt_tokens",
        "max_tokens_per_doc": "use truncate_prompt_tokens",
        "rank_fields": "send each document as text",
    }
)  # fmt: skip

# Values, besides null, false and empty ones, with which a refused field asks for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "length_penalty": (1,),
        "n": (1,),
        "best_of": (1,),
        "stream_interval": (1,),
        "routed_experts_start_len": (0,),
        "routed_experts_prompt_start": (0,),
        "routed_dp_rank": (0,),
        "data_parallel_rank": (0,),
        "thinking_token_budget": (-1,),
        "return_mm_kwargs": (True,),
        "include_reasoning": (True,),
        "stream_reasoning": (True,),
        "separate_reasoning": (True,),
        "add_generation_prompt": (True,),
        "add_special_tokens": (True,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "log_metrics": (True,),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "service_tier": ("auto", "default", "standard_only"),
        "priority": (0,),
        "normalize": (True,),
        "softmax": (True,),
        "use_activation": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "truncation": ("disabled",),
        "tool_choice": ("none", "auto"),
        "model": ("default",),
    }
)


def check_fields(known: Iterable[str], given: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a JSON object that are not `known` and are ignored. Raises ApiError 400 for a
    name that may not be ignored."""
    unknown = given.keys() - known
    if not unknown:
        return ()
    ignored = []
    for name in (name for name in given if name in unknown):  # in the client's order
        if name in WITHOUT_EFFECT:
            continue
        if name in REFUSED:
            _refuse(name, given[name])
        else:
            ignored.append(name)
    return _spelt_right(ignored, known)


def ignored_header(names: Iterable[str]) -> tuple[bytes, bytes]:
    """The response header that lists the ignored fields."""
    return IGNORED, ", ".join(_UNPRINTABLE.sub("?", name[:_MAX_NAME]) for name in names).encode()


def _refuse(name: str, value: Any) -> None:
    """Raise ApiError 400 unless the value asks for nothing."""
    if value is None or value is False or value in ("", [], {}):
        return
    if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ())):
        return
    remedy = REFUSED[name]
    if remedy == _HERE:
        raise ApiError(400, f"{name} is not a field of this route; leave it out", name)
    raise ApiError(400, f"{name} is not supported; {remedy}", name)


def _spelt_right(names: list[str], known: Iterable[str]) -> tuple[str, ...]:
    """The names, none of which is close to a known one. Raises ApiError 400."""
    if len(names) > MAX_UNKNOWN:
        raise ApiError(400, f"the body has {len(names)} unknown fields; it may have {MAX_UNKNOWN}", names[0][:_MAX_NAME])
    for name in names:
        if len(name) <= _MAX_NAME and (close := get_close_matches(name.lower(), known, n=1, cutoff=CLOSENESS)):
            raise ApiError(400, f"{name} is no field of this route; did you mean {close[0]}?", name)
    return tuple(names)


def check_nested_fields(place: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ApiError 400 for a field of the nested object `place` that is not `known`; null and
    false are ignored.

    Nested objects have no list of ignored fields, so every unknown field is refused by its path.
    """
    for name, value in given.items():
        if name in known or value is None or value is False:
            continue
        shown = name[:_MAX_NAME]
        close = get_close_matches(shown.lower(), known, n=1, cutoff=CLOSENESS)
        remedy = f"did you mean {close[0]}?" if close else f"it may have {', '.join(known)}"
        raise ApiError(400, f"{place}.{shown} is not a known field; {remedy}", f"{place}.{shown}")
