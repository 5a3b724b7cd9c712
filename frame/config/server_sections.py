"""The sections of `FrameConfig` for what is around the engine: adapters, media, text, the HTTP
server, batches, plugins and logs. See `frame.config.schema`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from frame.config.section import Auto, Counts, JsonObject, Module, Section, setting


class AdaptersSection(Section):
    """LoRA adapters that requests select by name."""

    enabled: bool = setting(False, "Serve LoRA adapters.", flag="enable-lora")
    modules: tuple[Annotated[str, Module], ...] = setting((), "Adapters that are loaded at start, as NAME=FOLDER.", flag="lora-modules")
    folders: tuple[str, ...] = setting(
        (), "Folders below which the load routes may read adapters. Default: none; the load routes read no folder.", flag="lora-folders"
    )
    uploads: bool = setting(False, "Let the load routes take an adapter as a safetensors body.", flag="lora-uploads")
    format: Annotated[str | None, Auto] = setting(None, "Adapter format, by plugin name. auto: by adapter_config.json.", flag="lora-format")
    max_active: int = setting(8, "Maximum number of adapters in a step, each with a place on the device.", flag="max-loras", ge=1, le=1024)
    max_rank: int = setting(64, "Maximum rank of an adapter.", flag="max-lora-rank", ge=1, le=1024)
    max_loaded: int = setting(
        32, "Maximum number of adapters in host memory; the least recently used one is evicted.", flag="max-cpu-loras", ge=1, le=65536
    )
    routers: bool = setting(
        False, "Let adapters change routers of experts, which makes all steps with adapters slower.", flag="lora-routers"
    )
    pages: Annotated[int | None, Auto] = setting(
        None,
        "Size of the device's adapter pool in pages of 16 ranks. auto: adapters.max_active of the largest rank.",
        flag="lora-pages",
        ge=1,
    )


class MediaSection(Section):
    """Images, videos and audio in requests."""

    enabled: Annotated[bool | None, Auto] = setting(
        None,
        "Serve the media that the model reads. auto: if the checkpoint has encoders and the packages are installed.",
        flag="enable-media",
    )
    modalities: Annotated[tuple[str, ...] | None, Auto] = setting(
        None, "Modalities, by plugin name. auto: all that the model reads.", flag="media-modalities"
    )
    processes: Annotated[int | None, Auto] = setting(
        None, "Number of processes that decode files. auto: a quarter of the cores, from 2 to 8.", flag="media-processes", ge=1, le=64
    )
    limits: Annotated[dict[str, Annotated[int, Field(ge=0, le=10_000)]], Counts] = setting(
        {}, "Maximum number of items of a request, as image=4,video=1. Default: image=64,video=4,audio=16.", flag="limit-mm-per-prompt"
    )
    allowed_domains: tuple[str, ...] = setting(
        (),
        "Hosts of http(s) URLs in requests: example.com, *.example.com, HOST:PORT, or * for all public ones; addresses and networks "
        "that are named need not be public. Default: only data: URLs.",
        flag="allowed-media-domains",
    )
    allowed_local_path: str | None = setting(
        None,
        "Folder below which file: URLs of requests are read. Default: none; they are refused.",
        flag="allowed-local-media-path",
        min_length=1,
    )
    processor_options: Annotated[dict[str, Any], JsonObject] = setting(
        {},
        "Options of the checkpoint's image processor, as JSON; the keys video and audio hold those of other processors.",
        flag="mm-processor-kwargs",
    )
    table_rows: int = setting(0, "Rows of encoder output on the device, one a placeholder token; 0: chosen.", flag="media-rows", ge=0)
    encode_budget: Annotated[int | None, Auto] = setting(
        None,
        "Maximum positions (patches) that the encoder computes before a step; an item with more is encoded alone, or beside decodes by "
        "several steps. auto: from the model.",
        flag="encode-budget",
        ge=1,
    )
    max_bytes: int = setting(64 << 20, "Maximum size of a file, in bytes.", flag="media-max-bytes", ge=1024, le=1 << 31)
    max_pixels: int = setting(64_000_000, "Maximum number of pixels of a picture.", flag="media-max-pixels", ge=1, le=1 << 31)
    max_seconds: float = setting(3600.0, "Maximum length of a video or audio file, in seconds.", flag="media-max-seconds", gt=0)
    timeout: float = setting(15.0, "Maximum seconds to fetch a file.", flag="media-timeout", gt=0, le=600)
    decode_timeout: float = setting(60.0, "Maximum seconds to decode a file.", flag="media-decode-timeout", gt=0, le=3600)
    process_memory: int = setting(2 << 30, "Maximum memory to decode a file, in bytes.", flag="media-process-memory", ge=64 << 20)


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
    key_store: str | None = setting(
        None,
        "Plugin that knows whose key a request has, by name. Default: the keys of server.api_key and server.api_keys, where one is set.",
        flag="key-store",
    )
    ssl_certfile: str | None = setting(
        None, "PEM file of the certificate chain; enables TLS for HTTP, gRPC and the admin port.", flag="ssl-certfile")  # fmt: skip
    ssl_keyfile: str | None = setting(None, "PEM file of the certificate's private key. Default: server.ssl_certfile.", flag="ssl-keyfile")
    insecure: bool = setting(False, "Allow an address that other machines can reach without an API key.", flag="insecure")
    share_cache: bool = setting(
        False, "Share cached prefixes between API keys; response times reveal the prompts of other keys.", flag="share-cache")  # fmt: skip
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
    tracer: str | None = setting(
        None, "Plugin that writes the spans of requests, by name. Default: OpenTelemetry, where server.otlp_endpoint is set.", flag="tracer"
    )
    otlp_endpoint: str | None = setting(
        None, "URL of an OTLP/HTTP collector for traces, such as http://localhost:4318.", flag="otlp-endpoint"
    )
    metrics_aliases: tuple[Literal["vllm", "sglang"], ...] = setting(
        ("vllm", "sglang"), "Servers whose metric names /metrics repeats next to frame's names: vllm, sglang.", flag="metrics-aliases"
    )
    state_dir: str | None = setting(
        None,
        "Folder in which stored responses, conversations, files and batches outlive the server; several servers may share it."
        " Default: memory, and no batches.",
        flag="state-dir",
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

    folder: str | None = setting(
        None,
        "Folder of batch files and results, which several servers may share. Default: in server.state_dir; without it, /v1/batches is"
        " refused.",
        flag="batch-folder",
    )
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
    request_dump: str | None = setting(
        None,
        "Folder of a record of each request, for frame replay, which only its owner may read. Default: none; no request is recorded.",
        flag="request-dump",
        min_length=1,
    )
    request_dump_content: Literal["full", "shapes"] = setting(
        "full",
        "What is recorded: full (prompts and outputs as token ids, all parameters) or shapes (lengths, times and numbers only).",
        flag="request-dump-content",
    )
    request_dump_share: float = setting(
        1.0,
        "Fraction of the requests that is recorded. After a crash of the engine, all of the last five minutes are.",
        flag="request-dump-share",
        ge=0,
        le=1,
    )
    request_dump_max_bytes: int = setting(
        1 << 30, "Maximum size of log.request_dump in bytes; the oldest files are removed.", flag="request-dump-max-bytes", ge=1 << 20
    )
    request_dump_max_age: float = setting(
        86400.0, "Seconds until a record of log.request_dump is removed.", flag="request-dump-max-age", ge=60
    )
