"""`FrameConfig`: all settings, in frozen sections. It must not know plugins: their own settings are
under `plugins.options`.

`None` (also written `auto` in YAML and flags) leaves a value to `frame.config.resolve`, which
records the reason of its choice. `flag` names a field's command-line flag and its keyword in
`Engine(...)`; without one it is `section_field`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from frame.config.section import Auto, Module, Phases, Section, TypeName, lower, setting
from frame.core.interfaces.drafter import MAX_STEPS
from frame.core.interfaces.model import PoolingMode, Task

DType = Literal["float32", "bfloat16", "float16"]
KVDType = Literal["float32", "bfloat16", "float16", "fp8_e4m3", "int8"]


class ModelSection(Section):
    """The served model and its weights."""

    path: str = setting(
        "frame-tiny", "Folder of a checkpoint in Hugging Face layout, or the embedded model frame-tiny.", flag="model", min_length=1
    )
    served_name: str | None = setting(None, "Name of the model in the API. Default: the folder's name.", flag="served-model-name")
    served_aliases: tuple[str, ...] = setting((), "Additional names of the model in the API.", flag="served-model-aliases")
    tokenizer: str | None = setting(None, "Folder of the tokenizer. Default: the model's folder.", flag="tokenizer")
    skip_tokenizer_init: bool = setting(
        False, "Load no tokenizer; requests and responses contain token ids only.", flag="skip-tokenizer-init"
    )
    task: Annotated[Task | None, Auto] = setting(
        None, "Task of the model: generate (text), embed (vectors) or classify (class scores, relevance). auto: from the checkpoint."
    )
    pooling: Annotated[PoolingMode | None, Auto] = setting(
        None, "Pooling of token states into the vector of a sequence: cls, last, mean or max. auto: from the checkpoint.", flag="pooling"
    )
    label_tokens: tuple[str, ...] = setting(
        (),
        "Tokens whose logits are the class scores, for model.task classify of a language model; the positive class last.",
        flag="label-tokens",
    )
    dtype: Annotated[DType | None, Auto, TypeName] = setting(
        None, "Data type of weights and activations. auto: from the checkpoint and the device.", flag="dtype"
    )
    load_format: Annotated[str | None, Auto] = setting(
        None, "Weight source, by plugin name. auto: the best that reads the checkpoint.", flag="load-format"
    )
    quantization: Annotated[str | None, Auto] = setting(
        None,
        "Weight format, by plugin name: how the checkpoint stores weights, or how plain weights are quantized while loading; "
        "none: unquantized. auto: from the checkpoint.",
        flag="quantization",
    )
    gemm_kernel: Annotated[str | None, Auto] = setting(
        None, "GEMM kernel of quantized weights, by plugin name. auto: by measured speeds, for each number of rows.", flag="gemm-kernel"
    )
    trust_remote_code: bool = setting(
        False, "Run Python code of the checkpoint (model, tokenizer, processor) with the rights of the server.", flag="trust-remote-code"
    )
    max_context: Annotated[int | None, Auto] = setting(
        None, "Maximum number of tokens of a sequence, prompt plus output. auto: from the checkpoint.", flag="max-model-len", ge=1
    )
    implementation: Annotated[str | None, Auto] = setting(
        None, "Model implementation, by plugin name. auto: the best one for the architecture.", flag="model-impl"
    )
    seed: int = setting(0, "Seed of dummy weights, and of requests without a seed.", flag="seed", ge=-(1 << 63), lt=1 << 63)


class ParallelSection(Section):
    """Distribution of the model over devices."""

    tp: int = setting(1, "Number of tensor-parallel ranks.", flag="tp", ge=1, le=64)
    pp: int = setting(1, "Number of pipeline stages, each with parallel.tp ranks and a range of the layers.", flag="pp", ge=1, le=64)
    ep: int = setting(1, "Number of ranks among which whole experts are divided: parallel.tp, or 1: none.", flag="ep", ge=1, le=64)
    dp: int = setting(1, "Number of replicas of the engine behind one server, each with ranks of its own.", flag="dp", ge=1, le=64)
    dp_attention: bool = setting(False, "Divide the ranks into parallel.dp groups with own requests.", flag="enable-dp-attention")
    redundant_experts: int = setting(
        0, "Number of additional places for experts, divided among the parallel.ep ranks.", flag="ep-num-redundant-experts", ge=0, le=1024
    )
    eplb: bool = setting(
        False, "Balance the load of the parallel.ep ranks: count each expert's tokens and move experts between steps.", flag="enable-eplb"
    )
    eplb_interval: int = setting(1000, "Steps between two placements of experts.", flag="eplb-rebalance-num-iterations", ge=1)
    eplb_stage_bytes: int = setting(
        64 << 20, "Maximum bytes of experts that move between two steps, at least one expert.", flag="eplb-stage-bytes", ge=1
    )
    collective: Annotated[str | None, Auto] = setting(
        None, "Collective of the ranks, by plugin name. auto: the best-ranked one for the platform.", flag="collective"
    )
    launcher: Annotated[str | None, Auto] = setting(None, "Launcher of the ranks, by plugin name. auto: best-ranked.", flag="launcher")
    nnodes: int = setting(1, "Number of hosts, each with an equal part of the ranks.", flag="nnodes", ge=1, le=64)
    node_rank: int = setting(0, "Number of this host among parallel.nnodes; 0 serves HTTP.", flag="node-rank", ge=0, le=63)
    dist_init_addr: str | None = setting(None, "HOST:PORT of the first host, where the hosts meet.", flag="dist-init-addr")


class AttentionSection(Section):
    """Attention kernels."""

    backend: Annotated[str | None, Auto, Phases] = setting(
        None,
        "Attention backend, by plugin name; prefill=NAME,decode=NAME (a mapping in YAML) sets one per phase.",
        flag="attention-backend",
    )


class CacheSection(Section):
    """The paged KV cache and the prefix cache."""

    prefix: Annotated[str | None, Auto] = setting(
        None, "Prefix cache, by plugin name. none: no reuse. auto: the best that the model can use.", flag="prefix-cache"
    )
    eviction: str = setting("lru", "Eviction policy of the prefix cache, by plugin name.", flag="eviction-policy")
    page_size: Annotated[int | None, Auto] = setting(
        None, "Tokens per page of the KV cache. auto: from the attention backend.", flag="page-size", ge=1, le=1024
    )
    kv_dtype: Annotated[KVDType | None, Auto, TypeName] = setting(
        None, "Data type of cached keys and values. auto: model.dtype.", flag="kv-cache-dtype"
    )
    mem_fraction: Annotated[float | None, Auto] = setting(
        None, "Fraction of the device's memory for weights and KV cache together.", flag="mem-fraction-static", gt=0.0, le=1.0
    )
    max_total_tokens: Annotated[int | None, Auto] = setting(
        None, "Capacity of the KV cache in tokens. auto: from cache.mem_fraction.", flag="max-total-tokens", ge=16
    )


class SchedulerSection(Section):
    """Limits and order of running requests."""

    policy: str = setting("fcfs", "Scheduling policy, by plugin name.", flag="schedule-policy")
    max_running_requests: Annotated[int | None, Auto] = setting(
        None, "Maximum number of running sequences. auto: from the capacity of the KV cache.", flag="max-running-requests", ge=1, le=65536
    )
    max_queued_requests: int = setting(
        10_240, "Maximum number of waiting sequences; further requests get 503.", flag="max-queued-requests", ge=1
    )
    chunked_prefill_size: Annotated[int | None, Auto] = setting(
        None, "Maximum number of prompt tokens per step. auto: from the device.", flag="chunked-prefill-size", ge=1
    )
    overlap: Annotated[bool | None, Auto] = setting(None, "Schedule the next step while the current one runs.", flag="overlap")
    request_timeout: float = setting(600.0, "Seconds from the arrival of a request until it is ended.", flag="request-timeout", gt=0)
    preemption: bool = setting(
        True, "Allow the scheduling policy to preempt running requests (the policy priority does).", flag="preemption"
    )
    short_prompt_share: float = setting(
        0.5,
        "Fraction of chunked_prefill_size that is reserved for short prompts while a long prompt is prefilled.",
        flag="short-prompt-share",
        ge=0.0,
        le=0.9,
    )


class MoESection(Section):
    """Execution of mixture-of-experts layers."""

    runner: Annotated[str | None, Auto] = setting(None, "MoE runner (computes the experts), by plugin name.", flag="moe-runner")
    dispatcher: Annotated[str | None, Auto] = setting(
        None, "MoE dispatcher (exchanges tokens between ranks), by plugin name.", flag="moe-dispatcher"
    )


class ExecutionSection(Section):
    """Device, compilation and CUDA graphs."""

    device: Annotated[str | None, Auto] = setting(
        None, "Platform that the model runs on, by plugin name. auto: the best-ranked one with a device.", flag="device"
    )
    threads: Annotated[int | None, Auto] = setting(
        None, "Number of CPU threads of a rank, for the device cpu.", flag="threads", ge=1, le=1024
    )
    torch_compile: bool = setting(False, "Compile decode steps with torch.compile.", flag="enable-torch-compile")
    torch_compile_max_bs: int = setting(32, "Maximum batch size that torch.compile compiles.", flag="torch-compile-max-bs", ge=1)
    cuda_graph_max_bs: Annotated[int | None, Auto] = setting(
        None, "Maximum batch size of decode CUDA graphs; 0: no decode graphs.", flag="cuda-graph-max-bs", ge=0, le=4096
    )
    prompt_graph_max_tokens: Annotated[int | None, Auto] = setting(
        None,
        "Maximum number of tokens of a prefill step that runs with piecewise CUDA graphs; 0: no piecewise graphs.",
        flag="prompt-graph-max-tokens",
        ge=0,
        le=8192,
    )
    profile_dir: str | None = setting(
        None, "Folder of the traces that /start_profile writes. Default: none; /start_profile is refused.", flag="profile-dir"
    )
    check_integrity: Literal["off", "repair", "fatal"] = setting(
        "repair",
        "Action if the idle self-check of pages and slots fails: repair, fatal (end the engine); off: no self-check.",
        flag="check-integrity",
    )


class SamplingSection(Section):
    """Logits processors and grammars."""

    processors: tuple[str, ...] = setting(
        ("builtin",), "Logits processors, by plugin name and in order; builtin: all in-tree ones.", flag="logits-processors"
    )
    grammar: Annotated[str | None, Auto] = setting(None, "Grammar backend, by plugin name.", flag="grammar-backend")
    grammar_workers: int = setting(
        2, "Number of grammar compiler processes, started on demand; 0: compile in the engine, without time and memory limits.", ge=0, le=16
    )
    grammar_timeout: float = setting(10.0, "Maximum seconds to compile one grammar, and to wait in the compilation queue.", gt=0, le=600)
    grammar_budget: float = setting(
        5.0, "Maximum CPU seconds of a request's grammar, for compilation and masks; each output token adds 2 ms.", gt=0, le=3600
    )
    grammar_memory: int = setting(1 << 30, "Maximum memory to compile one grammar, in bytes.", ge=64 << 20)
    grammar_cache: int = setting(256 << 20, "Maximum memory of the cache of compiled grammars, in bytes.", ge=0)
    jump_forward: Annotated[int | None, Auto] = setting(
        None,
        "Minimum number of consecutive forced tokens that are computed in one step without sampling; 0: no jump-forward.",
        flag="grammar-jump-forward",
        ge=0,
        le=256,
    )


class SpeculativeSection(Section):
    """Speculative decoding: drafted tokens that the model verifies. The output stays the same."""

    algorithm: Annotated[str | None, Auto, BeforeValidator(lower)] = setting(
        None, "Drafter, by plugin name. Default: none; each step draws one token a sequence.", flag="speculative-algorithm"
    )
    num_steps: int = setting(3, "Maximum number of drafted tokens a step and sequence.", flag="speculative-num-steps", ge=1, le=MAX_STEPS)
    adaptive: bool = setting(
        True, "Choose the draft length of each step, 0 to num_steps, by the measured output rate.", flag="speculative-adaptive"
    )
    draft_model_path: str | None = setting(
        None, "Folder of the checkpoint of the draft model, for drafters that have one.", flag="speculative-draft-model-path"
    )
    synthetic_acceptance_length: float | None = setting(
        None,
        "For benchmarks, with wrong outputs: accept drafts at random, so many tokens a step in the mean, 1 to num_steps + 1.",
        flag="speculative-synthetic-acceptance-length",
        ge=1,
        le=MAX_STEPS + 1,
    )


class AdaptersSection(Section):
    """LoRA adapters that requests select by name."""

    enabled: bool = setting(False, "Serve LoRA adapters.", flag="enable-lora")
    modules: tuple[Annotated[str, Module], ...] = setting((), "Adapters that are loaded at start, as NAME=FOLDER.", flag="lora-modules")
    folders: tuple[str, ...] = setting(
        (),
        "Folders below which the load routes may read adapters. Default: none; the load routes read no folder.",
        flag="lora-folders",
    )
    uploads: bool = setting(False, "Let the load routes take an adapter as a safetensors body.", flag="lora-uploads")
    format: Annotated[str | None, Auto] = setting(None, "Adapter format, by plugin name. auto: by adapter_config.json.", flag="lora-format")
    max_active: int = setting(8, "Maximum number of adapters in a step, each with a place on the device.", flag="max-loras", ge=1, le=1024)
    max_rank: int = setting(64, "Maximum rank of an adapter.", flag="max-lora-rank", ge=1, le=1024)
    max_loaded: int = setting(
        32, "Maximum number of adapters in host memory; the least recently used one is evicted.", flag="max-cpu-loras", ge=1, le=65536
    )
    pages: Annotated[int | None, Auto] = setting(
        None,
        "Size of the device's adapter pool in pages of 16 ranks. auto: adapters.max_active of the largest rank.",
        flag="lora-pages",
        ge=1,
    )


class TextSection(Section):
    """Tokenizer and detokenizer processes, templates, and parsers of the output."""

    tokenizer_workers: int = setting(
        0, "Number of tokenizer processes; 0: threads of the main process.", flag="tokenizer-workers", ge=0, le=64
    )
    detokenizer_workers: int = setting(
        0, "Number of detokenizer processes; 0: the main process detokenizes.", flag="detokenizer-workers", ge=0, le=1
    )
    reasoning_parser: Annotated[str | None, Auto] = setting(
        None, "Reasoning parser (separates thinking from the answer), by plugin name; none: no parser.", flag="reasoning-parser"
    )
    tool_call_parser: Annotated[str | None, Auto] = setting(
        None, "Tool call parser (extracts tool calls from the answer), by plugin name; none: no parser.", flag="tool-call-parser"
    )
    moderation_policy: str | None = setting(
        None,
        "Policy of /v1/moderations with a language model: default, or a file. Default: the route is refused.",
        flag="moderation-policy",
    )
    score_prompt: str | None = setting(
        None,
        "File of the prompt for relevance scores by a language model, with {instruction}, {query} and {document}.",
        flag="score-prompt",
    )
    chat_template: str | None = setting(None, "File of a Jinja chat template. Default: the model's template.", flag="chat-template")
    trust_request_chat_template: bool = setting(
        False, "Run the Jinja template in a request's field chat_template.", flag="trust-request-chat-template"
    )


class ServerSection(Section):
    """The HTTP server, access, limits and process supervision."""

    host: str = setting("127.0.0.1", "IP address or host name to listen on.", flag="host", min_length=1)
    port: int = setting(30000, "Port to listen on; 0: a free port.", flag="port", ge=0, le=65535)
    api_key: str | None = setting(None, "API key that every request must send (Authorization: Bearer, or x-api-key).", flag="api-key")
    api_keys: str | None = setting(None, "File of additional API keys, one per line, plain or as sha256:HEX.", flag="api-keys")
    ssl_certfile: str | None = setting(
        None, "PEM file of the certificate chain; enables TLS for HTTP, gRPC and the admin port.", flag="ssl-certfile"
    )
    ssl_keyfile: str | None = setting(None, "PEM file of the certificate's private key. Default: server.ssl_certfile.", flag="ssl-keyfile")
    insecure: bool = setting(False, "Allow an address that other machines can reach without an API key.", flag="insecure")
    share_cache: bool = setting(
        False, "Share cached prefixes between API keys; response times then reveal the prompts of other keys.", flag="share-cache"
    )
    max_requests_per_key: int | None = setting(
        None, "Maximum number of concurrent requests of an API key, over HTTP and gRPC, each of n counted; more get 429.",
        flag="max-requests-per-key", ge=1,
    )  # fmt: skip
    max_sequences_per_request: int = setting(
        2048, "Maximum number of sequences of a request (prompts times n, inputs, documents); more get 400.",
        flag="max-sequences-per-request", ge=1,
    )  # fmt: skip
    max_connections: int = setting(4096, "Maximum number of open connections; more get 503.", flag="max-connections", ge=1)
    client_timeout: float = setting(
        60.0,
        "Seconds to wait for a client: TLS handshake, request head, next part of a body, or reading of a response.",
        flag="client-timeout",
        gt=0,
    )
    max_unread_tokens: int = setting(
        16_384, "Maximum number of streamed tokens that a client has not read; beyond it, the request is ended.",
        flag="max-unread-tokens", ge=64,
    )  # fmt: skip
    max_body_bytes: int = setting(
        32 * 1024 * 1024, "Maximum size of a request body or uploaded file, in bytes; routes also limit bodies by model.max_context.",
        flag="max-body-bytes", ge=1024,
    )  # fmt: skip
    extensions: tuple[str, ...] = setting(
        ("builtin",), "HTTP extensions (APIs, middleware, hooks), by plugin name and in order; builtin: all in-tree APIs.",
        flag="http-extensions",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), "Origins whose web pages may use the API, such as https://app.example; *: all origins.", flag="cors-origins"
    )
    cors_credentials: bool = setting(False, "Allow credentials (cookies) in requests from server.cors_origins.", flag="cors-credentials")
    grpc_port: int | None = setting(
        None, "Port of the gRPC service, on server.host; 0: a free port. Default: no gRPC service.", flag="grpc-port", ge=0, le=65535
    )
    admin_host: str = setting("127.0.0.1", "IP address or host name of the admin listener.", flag="admin-host", min_length=1)
    admin_port: int | None = setting(
        None,
        "Port of the admin listener, which then has all admin routes; 0: a free port. Default: admin routes are on server.port.",
        flag="admin-port",
        ge=0,
        le=65535,
    )
    admin_socket: str | None = setting(
        None, "Path of a Unix socket (mode 0600) for admin routes, instead of server.port.", flag="admin-socket"
    )
    admin_key: str | None = setting(None, "Key that requests to admin routes must send.", flag="admin-key")
    otlp_endpoint: str | None = setting(
        None, "URL of an OTLP/HTTP collector for traces, such as http://localhost:4318.", flag="otlp-endpoint"
    )
    metrics_aliases: tuple[Literal["vllm", "sglang"], ...] = setting(
        ("vllm", "sglang"), "Servers whose metric names /metrics repeats next to frame's names: vllm, sglang.", flag="metrics-aliases"
    )
    response_store_size: int = setting(
        1000, "Maximum number of responses and conversations stored in memory; 0: none are stored.", flag="response-store-size", ge=0
    )
    response_store_bytes: int = setting(
        64 * 1024 * 1024, "Maximum memory of stored responses, in bytes.", flag="response-store-bytes", ge=0
    )
    response_store_share: float = setting(
        0.25, "Maximum fraction of the response store for one API key.", flag="response-store-share", gt=0, le=1
    )
    response_store_ttl: float = setting(3600.0, "Seconds until a stored response or conversation expires.", flag="response-store-ttl", gt=0)
    drain_timeout: float = setting(30.0, "Maximum seconds to finish running requests after SIGTERM.", flag="drain-timeout", ge=0)
    heartbeat_timeout: float = setting(
        120.0, "Seconds without a heartbeat until a process is restarted as hung; 0: never.", flag="heartbeat-timeout", ge=0
    )
    max_restarts: int = setting(
        16,
        "Maximum number of process restarts in ten minutes; one more ends the server. 0: the first failure ends it.",
        flag="max-restarts",
        ge=0,
    )
    max_process_memory: int | None = setting(
        None, "Memory of a process, in bytes without mapped files, at which it is restarted. Default: no limit.", ge=64 << 20
    )
    max_device_memory: int | None = setting(
        None, "Device memory in bytes at which the engine is restarted. Default: no limit.", ge=64 << 20
    )
    max_process_threads: int | None = setting(None, "Number of threads at which a process is restarted. Default: no limit.", ge=16)
    max_process_files: int | None = setting(
        None, "Number of open files and sockets at which a process is restarted. Default: no limit.", ge=16
    )


class BatchesSection(Section):
    """The batch API (/v1/batches): files of requests that run at low priority."""

    folder: str | None = setting(None, "Folder of batch files and results. Default: none; /v1/batches is refused.", flag="batch-folder")
    max_bytes: int = setting(1024**3, "Maximum size of all batch files together, in bytes.", flag="batch-max-bytes", ge=1024)
    max_bytes_per_key: int = setting(
        256 * 1024**2, "Maximum size of the files of one API key, in bytes.", flag="batch-max-bytes-per-key", ge=1024
    )
    max_files_per_key: int = setting(
        1000, "Maximum number of files of one API key, including those of running batches.", flag="batch-max-files-per-key", ge=1
    )
    max_batches_per_key: int = setting(
        500, "Maximum number of batches kept per API key; a new batch replaces the oldest finished one.", ge=1
    )
    max_requests: int = setting(50_000, "Maximum number of requests in a batch.", flag="batch-max-requests", ge=1)
    concurrency: int = setting(8, "Maximum number of batch requests that run at the same time.", flag="batch-concurrency", ge=1, le=1024)


class PluginsSection(Section):
    """The plugins that are read, and their options."""

    allow: tuple[str, ...] | None = setting(
        None,
        "Distributions whose plugins are read; built-in plugins are always read. Default: all installed distributions.",
        flag="plugins-allow",
    )
    deny: tuple[str, ...] = setting(
        (), "Distributions whose plugins are not read, and single plugins, as kind/name, which are not used.", flag="plugins-deny"
    )
    paths: tuple[str, ...] = setting(
        (), "Python files, or folders with an `__init__.py`, whose plugins are read besides those of packages.", flag="plugin"
    )
    options: dict[str, dict[str, Any]] = setting({}, "Options of plugins: kind/name -> the plugin's own settings.")


class LogSection(Section):
    """Messages on standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting("info", "Minimum severity of log messages.", flag="log-level")
    format: Literal["text", "json"] = setting("text", "Format of log messages: text, or json (one object per line).", flag="log-format")
    access: bool = setting(False, "Log each HTTP request: method, path, status, seconds.", flag="access-log")
    stat_loggers: tuple[str, ...] = setting(
        ("builtin",),
        "Stat loggers that get the records of steps and requests, by plugin name; builtin: prometheus, which has /metrics.",
        flag="stat-loggers",
    )


class FrameConfig(Section):
    """The whole configuration: YAML file, environment (`FRAME_SECTION__FIELD`) and flags all become
    one of these."""

    model: ModelSection = Field(default_factory=ModelSection, description="Model and weights.")
    parallel: ParallelSection = Field(default_factory=ParallelSection, description="Distribution over devices.")
    attention: AttentionSection = Field(default_factory=AttentionSection, description="Attention kernels.")
    cache: CacheSection = Field(default_factory=CacheSection, description="KV cache and prefix cache.")
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection, description="Batching.")
    moe: MoESection = Field(default_factory=MoESection, description="Mixture of experts.")
    execution: ExecutionSection = Field(default_factory=ExecutionSection, description="Device and steps.")
    sampling: SamplingSection = Field(default_factory=SamplingSection, description="Logits processors, grammars.")
    speculative: SpeculativeSection = Field(default_factory=SpeculativeSection, description="Speculative decoding.")
    adapters: AdaptersSection = Field(default_factory=AdaptersSection, description="LoRA adapters.")
    text: TextSection = Field(default_factory=TextSection, description="Tokenizer, detokenizer, parsers.")
    server: ServerSection = Field(default_factory=ServerSection, description="HTTP server.")
    batches: BatchesSection = Field(default_factory=BatchesSection, description="Batch API.")
    plugins: PluginsSection = Field(default_factory=PluginsSection, description="Plugins.")
    log: LogSection = Field(default_factory=LogSection, description="Logging.")
