"""`declare`: the type of a response body, for `/openapi.json`, by the names of its fields.

One table has the fields that mean the same in every body, such as `created`; here too are the
bodies that several APIs share. Used by the modules with routes. Must not depend on a route.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

# The type of a field that is declared by its name alone; one that is not listed is a text.
_TYPES: dict[Any, str] = {
    int: """
        audio_tokens image_tokens video_tokens
        aborted accepted_prediction_tokens accepted_tokens age cache_creation_input_tokens cache_read_input_tokens cache_write_tokens
        cached_tokens completed completion_tokens content_index count created created_at device_memory drafted_tokens eval_count
        eval_duration evictable_pages expires_at failed generated_tokens hidden hits index input_tokens jumped_tokens length load_duration
        locks max_model_len namespace num_classes num_drafts outstanding output_index output_tokens page_size pages parent preempted
        priority prompt_eval_count prompt_eval_duration prompt_tokens reasoning_tokens rejected_prediction_tokens running sequence_number
        server_load size step tool_index total total_duration total_pages total_tokens used_pages waiting
    """,
    float: "compression_ratio drafter_seconds duration e2e_latency end logprob relevance_score score seconds temperature time top_p",
    bool: """
        background done flagged has_audio_understanding has_image_understanding has_more is_generation parallel_tool_calls paused store
        stream success
    """,
    str | None: """
        cache_salt error_file_id instructions language output_file_id param previous_response_id problem prompt_cache_key
        prompt_cache_retention safety_identifier stop_sequence user
    """,
    int | None: """
        cancelled_at cancelling_at completed_at expired_at failed_at finalizing_at in_progress_at max_output_tokens max_tool_calls rank
    """,
    str | int | None: "matched matched_stop",
    list[int]: "accepted_at output_ids prompt_token_ids text_offset token_ids",
    list[str]: "architectures capabilities families labels texts token_strs",
    list[dict[str, Any]]: "adapters broken plugins replicas settings tools",
    list[Any]: "annotations summary",
    dict[str, Any]: "config info model_info sampling_params",
    dict[str, str]: "metadata",
    dict[str, float]: "category_scores phases",
    None: "encrypted_content features moderation preferred_sampling_params prompt_cache_options refusal",
    Literal["default"]: "service_tier",
    Literal[True]: "deleted",
}
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names.split()}


def declare(title: str, names: str = "", doc: str | None = None, base: Any = None, **fields: Any) -> Any:
    """The type of a body: a TypedDict with the fields of `base`, `names` of fields of the table,
    and further `fields`, each with its type, or with the text that is its only value. A name with a
    question mark may be missing. `doc`: the description."""
    annotations = dict(base.__annotations__) if base is not None else {}
    for name in names.split():
        kind = _TYPE_OF.get(name.rstrip("?"), str)
        annotations[name.rstrip("?")] = NotRequired[kind] if name.endswith("?") else kind
    annotations |= {name: Literal[kind] if isinstance(kind, str) else kind for name, kind in fields.items()}
    make: Any = TypedDict
    declared = make(title, annotations)
    declared.__doc__, declared.__module__ = doc, __name__
    return declared


def array(kind: Any) -> Any:
    """The type of a list."""
    return GenericAlias(list, (kind,))


Version = declare("Version", "version")
CachedTokens = declare(
    "CachedTokens",
    "cached_tokens image_tokens? video_tokens? audio_tokens? cache_write_tokens?",
    "`image_tokens` and the next two: of prompts with media. `cache_write_tokens`: computed, and kept by a session."
    " `cached_tokens_by_tier`: where cache tiers have served some.",
    cached_tokens_by_tier=NotRequired[dict[str, int]],
)
Page = declare("Page", "first_id last_id has_more", "`first_id` and `last_id` are empty for an empty page.", object="list")
