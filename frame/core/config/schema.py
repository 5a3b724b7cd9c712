"""`FrameConfig`: all settings, in frozen sections. It must not know plugins: their own settings are
under `plugins.options`.

`None` (also written `auto` in YAML and flags) leaves a value to `frame.core.config.resolve`, which
records the reason of its choice. `flag` names a field's command-line flag and its keyword in
`Engine(...)`; without one it is `section_field`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from frame.core.interfaces.model import PoolingMode, Task

DType = Literal["float32", "bfloat16", "float16"]
KVDType = Literal["float32", "bfloat16", "float16", "fp8_e4m3"]
LoadFormat = Literal["auto", "safetensors", "dummy"]


TYPE_ALIASES: dict[str, str] = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "fp8_e4m3",
}


def _auto_is_none(value: Any) -> Any:
    return None if value == "auto" else value


def _full_type_name(value: Any) -> Any:
    return TYPE_ALIASES.get(value, value) if isinstance(value, str) else value


Auto = BeforeValidator(_auto_is_none)
TypeName = BeforeValidator(_full_type_name)  # `bf16` means bfloat16 wherever a type is named


def phase_backends(text: str | None) -> dict[str, str]:
    """Parse `attention.backend` into names by phase ("prefill", "decode"). A single name applies to
    both; open phases are left out. Raises ValueError for any other text."""
    if text is None or "=" not in text:
        return {} if text is None else dict.fromkeys(PHASES, text)
    found: dict[str, str] = {}
    for part in text.split(","):
        phase, _, name = (piece.strip() for piece in part.partition("="))
        if phase not in PHASES or not name or phase in found:
            raise ValueError(f"a backend's name, or prefill=NAME,decode=NAME, not {text!r}")
        if name != "auto":
            found[phase] = name
    return found


def _phases_as_text(value: Any) -> Any:
    """A mapping of phases as text, the form that flags and variables use too."""
    if isinstance(value, Mapping):
        value = ",".join(f"{phase}={name}" for phase, name in value.items() if name is not None) or None
    if not isinstance(value, str):
        return value
    found = phase_backends(value)
    if len(set(found.values())) == 1 and len(found) == len(PHASES):
        return found["decode"]
    return ",".join(f"{phase}={found[phase]}" for phase in PHASES if phase in found) or None


PHASES = ("prefill", "decode")
Phases = BeforeValidator(_phases_as_text)  # one attention backend, or one a phase


def setting(default: Any, description: str, *, flag: str | None = None, **bounds: Any) -> Any:
    """A configuration field with its default, one-sentence description, bounds and flag (`tp` ->
    `--tp`)."""
    return Field(default, description=description, json_schema_extra={"flag": flag} if flag else None, **bounds)


class Section(BaseModel):
    """Base of all sections: frozen. Unknown keys are errors, and so are NaN and infinity, which
    JSON cannot hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=False, protected_namespaces=())


class ModelSection(Section):
    """What is served and how its weights are read."""

    path: str = setting(
        "frame-tiny", "Folder of a checkpoint in Hugging Face layout, or the embedded frame-tiny.", flag="model", min_length=1
    )
    served_name: str | None = setting(None, "The model's name in the API; the folder's name when not set.", flag="served-model-name")
    served_aliases: tuple[str, ...] = setting((), "Further names of the model in the API.", flag="served-model-aliases")
    tokenizer: str | None = setting(None, "Folder of the tokenizer; the model's own when not set.", flag="tokenizer")
    skip_tokenizer_init: bool = setting(False, "Serve token ids only: no tokenizer is loaded.", flag="skip-tokenizer-init")
    task: Annotated[Task | None, Auto] = setting(
        None, "What the model is asked for: generate, embed (vectors) or classify (classes, relevance)."
    )
    pooling: Annotated[PoolingMode | None, Auto] = setting(
        None, "Of which tokens a sequence's vector is made: cls, last, mean, max; the checkpoint's own when not set.", flag="pooling"
    )
    label_tokens: tuple[str, ...] = setting(
        (), "For model.task classify of a language model: the tokens whose logits count, the wanted one last.", flag="label-tokens"
    )
    dtype: Annotated[DType | None, Auto, TypeName] = setting(None, "Computing type of weights and activations.", flag="dtype")
    load_format: LoadFormat = setting("auto", "Where weights come from: safetensors (auto too), dummy (random).", flag="load-format")
    quantization: Annotated[str | None, Auto] = setting(None, "Quantization method, by plugin name; `none` for plain.", flag="quantization")
    trust_remote_code: bool = setting(
        False, "Run Python code of the checkpoint (model, tokenizer, processor), with the server's rights.", flag="trust-remote-code"
    )
    max_context: Annotated[int | None, Auto] = setting(None, "Longest prompt plus output, in tokens.", flag="max-model-len", ge=1)
    implementation: Annotated[str | None, Auto] = setting(
        None, "Model plugin by name, instead of the best for the architecture.", flag="model-impl"
    )
    seed: int = setting(0, "Seed of dummy weights and of requests that bring none.", flag="seed", ge=-(1 << 63), lt=1 << 63)


class ParallelSection(Section):
    """How one model is spread over devices."""

    tp: int = setting(1, "Tensor-parallel ranks.", flag="tp", ge=1, le=64)


class AttentionSection(Section):
    """Which kernels compute attention."""

    backend: Annotated[str | None, Auto, Phases] = setting(
        None,
        "Attention backend, by plugin name; prefill=X,decode=Y (a mapping in YAML) takes one for prompts and one for decodes.",
        flag="attention-backend",
    )


class CacheSection(Section):
    """The paged KV cache and the prefix cache over it."""

    prefix: Literal["radix", "none"] = setting("radix", "Reuse the cache of equal prefixes (radix tree), or not.", flag="prefix-cache")
    eviction: str = setting("lru", "Eviction policy of the prefix cache, by plugin name.", flag="eviction-policy")
    page_size: Annotated[int | None, Auto] = setting(None, "Tokens in a page.", flag="page-size", ge=1, le=1024)
    kv_dtype: Annotated[KVDType | None, Auto, TypeName] = setting(None, "Type of cached keys and values.", flag="kv-cache-dtype")
    mem_fraction: Annotated[float | None, Auto] = setting(
        None, "Share of the device's memory for weights and KV cache together.", flag="mem-fraction-static", gt=0.0, le=1.0
    )
    max_total_tokens: Annotated[int | None, Auto] = setting(
        None, "Size of the KV cache in tokens, instead of from memory.", flag="max-total-tokens", ge=16
    )


class SchedulerSection(Section):
    """How much runs at once, and in which order."""

    policy: str = setting("fcfs", "Scheduling policy, by plugin name.", flag="schedule-policy")
    max_running_requests: Annotated[int | None, Auto] = setting(
        None, "Most requests on the device at once; the default follows the KV cache.", flag="max-running-requests", ge=1, le=65536
    )
    max_queued_requests: int = setting(10_240, "Most requests waiting; more are refused with 503.", flag="max-queued-requests", ge=1)
    chunked_prefill_size: Annotated[int | None, Auto] = setting(
        None, "Most prompt tokens computed in one step.", flag="chunked-prefill-size", ge=1
    )
    overlap: Annotated[bool | None, Auto] = setting(None, "Schedule the next step while the last one runs.", flag="overlap")
    request_timeout: float = setting(600.0, "Seconds after which a request is ended.", flag="request-timeout", gt=0)
    preemption: bool = setting(True, "Let a policy preempt running requests for a waiting one (priority does).", flag="preemption")
    short_prompt_share: float = setting(
        0.5, "Share of chunked_prefill_size kept for short prompts while a long one is computed.", flag="short-prompt-share", ge=0.0, le=0.9
    )


class MoESection(Section):
    """How mixture-of-experts layers run."""

    runner: Annotated[str | None, Auto] = setting(None, "Expert GEMMs, by plugin name.", flag="moe-runner")
    dispatcher: Annotated[str | None, Auto] = setting(None, "Token exchange between ranks, by plugin name.", flag="moe-dispatcher")


class ExecutionSection(Section):
    """Where and how steps are executed."""

    device: Annotated[Literal["cpu", "cuda"] | None, Auto] = setting(None, "Where the model runs.", flag="device")
    threads: Annotated[int | None, Auto] = setting(None, "Threads of one rank on the CPU.", flag="threads", ge=1, le=1024)
    torch_compile: bool = setting(False, "Compile the model with torch.compile.", flag="enable-torch-compile")
    torch_compile_max_bs: int = setting(32, "Largest batch that is compiled.", flag="torch-compile-max-bs", ge=1)
    cuda_graph_max_bs: Annotated[int | None, Auto] = setting(
        None, "Largest batch of decodes that runs as a CUDA graph; 0: none does.", flag="cuda-graph-max-bs", ge=0, le=4096
    )
    prompt_graph_max_tokens: Annotated[int | None, Auto] = setting(
        None,
        "Largest step with prompts, in tokens, whose layers run as CUDA graphs around attention; 0: none does.",
        flag="prompt-graph-max-tokens",
        ge=0,
        le=8192,
    )
    profile_dir: str | None = setting(None, "Folder for profiles that /start_profile records; not set: refused.", flag="profile-dir")
    check_integrity: Literal["off", "repair", "fatal"] = setting("repair", "What a failed self-check at idle does.", flag="check-integrity")


class SamplingSection(Section):
    """Plugins between logits and tokens."""

    processors: tuple[str, ...] = setting(
        (), "Third-party logits processors, by plugin name; built-in ones are always there.", flag="logits-processors"
    )
    grammar: Annotated[str | None, Auto] = setting(None, "Grammar backend, by plugin name.", flag="grammar-backend")
    grammar_workers: int = setting(
        2, "Processes that compile grammars, started as needed; 0: the engine's own, where nothing limits them.", ge=0, le=16
    )
    grammar_timeout: float = setting(10.0, "Seconds that one grammar may take to compile, or wait behind such ones.", gt=0, le=600)
    grammar_budget: float = setting(
        5.0, "Seconds of CPU that one request's grammar may take, compiled and at work; each token adds 2 ms.", gt=0, le=3600
    )
    grammar_memory: int = setting(1 << 30, "Bytes of memory that compiling one grammar may take.", ge=64 << 20)
    grammar_cache: int = setting(256 << 20, "Bytes of compiled grammars that are kept for the next request with the same.", ge=0)
    jump_forward: Annotated[int | None, Auto] = setting(
        None,
        "Fewest tokens in a row that a grammar must force for them to be computed in one step instead of drawn one by one; 0: no run is.",
        flag="grammar-jump-forward",
        ge=0,
        le=256,
    )


class TextSection(Section):
    """Tokenizer and detokenizer processes, and parsers of the output."""

    tokenizer_workers: int = setting(0, "Tokenizer processes; 0: threads of the main process.", flag="tokenizer-workers", ge=0, le=64)
    detokenizer_workers: int = setting(0, "Detokenizer processes; 0: in the main process.", flag="detokenizer-workers", ge=0, le=1)
    reasoning_parser: Annotated[str | None, Auto] = setting(
        None, "Separates thinking from the answer, by plugin name; `none` for none.", flag="reasoning-parser"
    )
    tool_call_parser: Annotated[str | None, Auto] = setting(
        None, "Finds tool calls in the answer, by plugin name; `none` for none.", flag="tool-call-parser"
    )
    moderation_policy: str | None = setting(
        None, "For /v1/moderations by a language model: `default`, or the file of a policy.", flag="moderation-policy"
    )
    score_prompt: str | None = setting(
        None, "File of the text that a language model judges relevance by, with {instruction}, {query} and {document}.", flag="score-prompt"
    )
    chat_template: str | None = setting(None, "File of a Jinja chat template, instead of the model's.", flag="chat-template")
    trust_request_chat_template: bool = setting(
        False, "Run the Jinja template that a request brings (chat_template).", flag="trust-request-chat-template"
    )


class ServerSection(Section):
    """The HTTP server."""

    host: str = setting("127.0.0.1", "Address to listen on.", flag="host", min_length=1)
    port: int = setting(30000, "Port to listen on; 0 takes a free one.", flag="port", ge=0, le=65535)
    api_key: str | None = setting(None, "Key that every request must bring (Authorization: Bearer, or x-api-key).", flag="api-key")
    api_keys: str | None = setting(None, "File of further keys: one a line, plain or sha256:HEX.", flag="api-keys")
    ssl_certfile: str | None = setting(
        None, "PEM file of the certificate chain: HTTP, gRPC and the admin port are served over TLS.", flag="ssl-certfile"
    )
    ssl_keyfile: str | None = setting(None, "PEM file of the certificate's key; not set: in the same file.", flag="ssl-keyfile")
    insecure: bool = setting(False, "Serve without a key on an address that other machines reach.", flag="insecure")
    share_cache: bool = setting(False, "Let requests of different keys share cached prefixes (their timing tells).", flag="share-cache")
    max_requests_per_key: int | None = setting(
        None, "Most requests of one key at once, over HTTP and gRPC, each of their sequences (n) counted; more are refused with 429.",
        flag="max-requests-per-key", ge=1,
    )  # fmt: skip
    max_sequences_per_request: int = setting(
        2048, "Most sequences of one request: prompts times n, inputs, documents; more are refused with 400.",
        flag="max-sequences-per-request", ge=1,
    )  # fmt: skip
    max_connections: int = setting(4096, "Most open connections; more are refused with 503.", flag="max-connections", ge=1)
    client_timeout: float = setting(
        60.0,
        "Seconds for a TLS handshake and for a request's head, between two pieces of a body, and without reading an answer.",
        flag="client-timeout",
        gt=0,
    )
    max_unread_tokens: int = setting(
        16_384, "Tokens of a streamed answer that may wait for its client to read them; then the request is ended.",
        flag="max-unread-tokens", ge=64,
    )  # fmt: skip
    max_body_bytes: int = setting(
        32 * 1024 * 1024, "Largest uploaded file, and the most bytes of any other body, which routes bound by the context besides.",
        flag="max-body-bytes", ge=1024,
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), "Origins whose web pages may use the API, such as https://app.example; `*`: all pages.", flag="cors-origins"
    )
    cors_credentials: bool = setting(
        False, "Let pages of server.cors_origins send requests with credentials of the browser (cookies).", flag="cors-credentials"
    )
    grpc_port: int | None = setting(
        None, "Port of the gRPC service, on the same address; 0 takes a free one, not set: none.", flag="grpc-port", ge=0, le=65535
    )
    admin_host: str = setting("127.0.0.1", "Address of the admin listener.", flag="admin-host", min_length=1)
    admin_port: int | None = setting(
        None, "Port of operators' routes, which then are nowhere else; 0 takes a free one.", flag="admin-port", ge=0, le=65535
    )
    admin_socket: str | None = setting(None, "Unix socket (mode 0600) for operators' routes.", flag="admin-socket")
    admin_key: str | None = setting(None, "Key that operators' routes ask for.", flag="admin-key")
    otlp_endpoint: str | None = setting(None, "OTLP/HTTP collector that gets traces, such as http://localhost:4318.", flag="otlp-endpoint")
    metrics_aliases: tuple[Literal["vllm", "sglang"], ...] = setting(
        ("vllm", "sglang"), "Whose names /metrics shows the metrics under besides its own.", flag="metrics-aliases"
    )
    response_store_size: int = setting(
        1000, "Most responses and conversations that are stored in memory; 0 stores none.", flag="response-store-size", ge=0
    )
    response_store_bytes: int = setting(64 * 1024 * 1024, "Most memory for stored responses.", flag="response-store-bytes", ge=0)
    response_store_share: float = setting(
        0.25, "Part of the response store that one API key may fill.", flag="response-store-share", gt=0, le=1
    )
    response_store_ttl: float = setting(3600.0, "Seconds that a response or conversation is stored.", flag="response-store-ttl", gt=0)
    drain_timeout: float = setting(30.0, "Seconds to finish running requests after SIGTERM.", flag="drain-timeout", ge=0)
    heartbeat_timeout: float = setting(
        120.0, "Seconds of silence after which a process counts as hung and is restarted; 0: never.", flag="heartbeat-timeout", ge=0
    )
    max_restarts: int = setting(
        16, "Restarts of dead processes within ten minutes; one more ends the server. 0: it ends with the first.", flag="max-restarts", ge=0
    )
    max_process_memory: int | None = setting(
        None, "Bytes of memory (without mapped files) at which a process is restarted; not set: never.", ge=64 << 20
    )
    max_device_memory: int | None = setting(None, "Bytes of device memory at which the engine is restarted; not set: never.", ge=64 << 20)
    max_process_threads: int | None = setting(None, "Threads at which a process is restarted; not set: never.", ge=16)
    max_process_files: int | None = setting(None, "Open files and sockets at which a process is restarted; not set: never.", ge=16)


class BatchesSection(Section):
    """Files of requests that are answered when there is time (/v1/batches)."""

    folder: str | None = setting(None, "Folder for files and batches; without one there are no batches.", flag="batch-folder")
    max_bytes: int = setting(1024**3, "Most bytes of all files together.", flag="batch-max-bytes", ge=1024)
    max_bytes_per_key: int = setting(256 * 1024**2, "Most bytes of one key's files.", flag="batch-max-bytes-per-key", ge=1024)
    max_files_per_key: int = setting(1000, "Most files of one key, those of running batches too.", flag="batch-max-files-per-key", ge=1)
    max_batches_per_key: int = setting(
        500, "Most batches of one key that are kept; a new one takes the place of the oldest that is over.", ge=1
    )
    max_requests: int = setting(50_000, "Most requests in one batch.", flag="batch-max-requests", ge=1)
    concurrency: int = setting(8, "Most requests of batches that run at once.", flag="batch-concurrency", ge=1, le=1024)


class PluginsSection(Section):
    """Which installed plugins may be used, and their own settings."""

    allow: tuple[str, ...] | None = setting(
        None, "Only these distributions' plugins are read (frame's own always are).", flag="plugins-allow"
    )
    deny: tuple[str, ...] = setting((), "These distributions' plugins are not read.", flag="plugins-deny")
    options: dict[str, dict[str, Any]] = setting({}, "Settings of plugins: `kind/name` -> that plugin's own keys.")


class LogSection(Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severity that is logged.", flag="log-level")
    format: Literal["text", "json"] = setting("text", "Lines for people, or one JSON object a line.", flag="log-format")
    access: bool = setting(False, "Log each HTTP request: method, path, status, seconds.", flag="access-log")


class FrameConfig(Section):
    """The whole configuration: YAML file, environment (`FRAME_SECTION__FIELD`) and flags all become
    one of these."""

    model: ModelSection = Field(default_factory=ModelSection, description="What is served.")
    parallel: ParallelSection = Field(default_factory=ParallelSection, description="Spreading over devices.")
    attention: AttentionSection = Field(default_factory=AttentionSection, description="Attention kernels.")
    cache: CacheSection = Field(default_factory=CacheSection, description="KV cache and prefix cache.")
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection, description="Batching.")
    moe: MoESection = Field(default_factory=MoESection, description="Mixture of experts.")
    execution: ExecutionSection = Field(default_factory=ExecutionSection, description="Device and steps.")
    sampling: SamplingSection = Field(default_factory=SamplingSection, description="Logits processors, grammars.")
    text: TextSection = Field(default_factory=TextSection, description="Tokenizer, detokenizer, parsers.")
    server: ServerSection = Field(default_factory=ServerSection, description="HTTP.")
    batches: BatchesSection = Field(default_factory=BatchesSection, description="Batches.")
    plugins: PluginsSection = Field(default_factory=PluginsSection, description="Plugins.")
    log: LogSection = Field(default_factory=LogSection, description="Logging.")
