"""The fields of messages, content parts, tools and items in the chat APIs, as `nested_fields` reads
them. Used by the request schemas. Must not depend on a route or the engine.

A known field is one that has an effect, that carries no request (an id, a status, log-probabilities
of an earlier response), or that the API accepts without one on every server (`cache_control`). The
kinds of content parts share one shape: a kind that is not supported is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from frame.entrypoints.http.protocol.nested_fields import Shape

# Chat completions, with the fields that templates and other servers' clients add to messages.
PART = Shape(
    "type text refusal cache_control annotations citations logprobs id index image_url input_audio audio_url video_url file image audio"
    " video uuid prompt_cache_breakpoint thinking signature reasoning"
)
FUNCTION_CALL = Shape("name arguments id description parsed_arguments")
CALL = Shape("id type index cache_control extra_content", {"function": FUNCTION_CALL, "custom": Shape("name input")})
FUNCTION = Shape("name description parameters strict return returns response type examples input_examples output_schema cache_control")
TOOL = Shape("type cache_control defer_loading allowed_callers eager_input_streaming", {"function": FUNCTION})
MESSAGE = Shape(
    "role name tool_call_id reasoning_content reasoning reasoning_details reasoning_text refusal audio annotations images thinking"
    " thinking_blocks tool_name tool_plan tools prefix partial cache_control id type status object created created_at index"
    " finish_reason stop_reason model usage logprobs metadata parsed token_ids weight phase provider_specific_fields additional_kwargs"
    " response_metadata extra_content encrypted_content reasoning_opaque signature is_error citations documents context",
    {"content": PART, "tool_calls": CALL, "function_call": FUNCTION_CALL},
)
NAMED = Shape("type name mode id", {"function": Shape("name")})
CHOICE = Shape("type name mode id", {"function": Shape("name"), "tools": NAMED, "allowed_tools": Shape("type mode", {"tools": NAMED})})
CHAT: Mapping[str, Shape] = {
    "messages": MESSAGE, "tools": TOOL, "functions": FUNCTION, "tool_choice": CHOICE, "function_call": Shape("name"),
}  # fmt: skip

# Ollama: a call's arguments and a tool's parameters are objects of their own.
OLLAMA: Mapping[str, Shape] = {"messages": MESSAGE, "tools": TOOL}

# Anthropic
SOURCE = Shape("type data media_type url file_id content")
BLOCK = Shape(
    "type text cache_control citations title context id name input tool_use_id is_error thinking signature data caller file_id url"
    " tool_name page_age encrypted_content retrieved_at server_name toolset_id",
    {"source": SOURCE},
)
BLOCK.nested["content"] = BLOCK  # of a tool's result
BLOCK.names |= {"content"}
MESSAGES: Mapping[str, Shape] = {
    "messages": Shape("role id type model stop_reason stop_sequence stop_details usage container context_management", {"content": BLOCK}),
    "system": BLOCK,
    "tools": Shape(
        "type name description input_schema cache_control strict eager_input_streaming defer_loading allowed_callers input_examples"
        " max_uses allowed_domains blocked_domains user_location display_width_px display_height_px display_number max_characters"
    ),
    "tool_choice": Shape("type name disable_parallel_tool_use"),
    "thinking": Shape("type budget_tokens", unused="display"),
    "output_config": Shape("effort", {"format": Shape("type schema name")}, unused="task_budget"),
}

# Responses and conversations
ITEM_PART = Shape(
    "type text refusal annotations logprobs id image_url file_id file_data file_url filename detail input_audio cache_control"
    " prompt_cache_breakpoint parsed encrypted_content"
)
ITEM = Shape(
    "type id role status phase name namespace call_id arguments input encrypted_content parsed_arguments created_by object created_at"
    " metadata caller action results queries internal_chat_message_metadata_passthrough model agent",
    {"content": ITEM_PART, "output": ITEM_PART, "summary": ITEM_PART},
)
ITEMS: Mapping[str, Shape] = {"items": ITEM}
RESPONSES: Mapping[str, Shape] = {
    "input": ITEM,
    "tools": Shape(
        "type name description parameters strict defer_loading allowed_callers output_schema cache_control",
        {"format": Shape("type syntax definition")},
    ),
    "tool_choice": CHOICE,
    "text": Shape("format", unused="verbosity"),
    "reasoning": Shape("effort encrypted_content", unused="summary generate_summary context mode"),
    "conversation": Shape("id object created_at metadata"),
}
