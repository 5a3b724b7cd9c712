"""`FrameConfig`: all settings, in frozen sections. It must not know plugins: their own settings are
under `plugins.options`.

`None` (also written `auto` in YAML and flags) leaves a value to `frame.config.resolve`, which
records the reason of its choice. `flag` names a field's command-line flag and its keyword in
`Engine(...)`; without one it is `section_field`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from frame.config.section import Auto, Defaults, Endpoint, ModelName, Phases, Section, TypeName, lower, setting
from frame.config.server_sections import (
    AdaptersSection,
    BatchesSection,
    LogSection,
    MediaSection,
    PluginsSection,
    ServerSection,
    TextSection,
)
from frame.core.interfaces.drafter import MAX_STEPS
from frame.core.interfaces.model import Task

DType = Literal["float32", "bfloat16", "float16"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
WRITE_POLICY, MIN_LOAD_TOKENS = "write_through", 256  # the defaults
SESSION_SHARE = 0.25
HOST, PORT = "127.0.0.1", 5600  # of disaggregation
KVDType = Literal["float32", "bfloat16", "float16", "fp8_e4m3", "int8"]


class ModelSection(Section):
    """The served model and its weights."""

    path: str = setting(
        "frame-tiny",
        "Folder of a checkpoint in Hugging Face layout, the embedded model frame-tiny, or a model on a hub, as ORG/NAME or "
        "ORG/NAME:REVISION: `frame pull` or model.download fetches it.",
        flag="model",
        min_length=1,
    )
    download: bool = setting(
        False,
        "Download what model.path, model.tokenizer and speculative.draft_model_path name on a hub, if the cache lacks it.",
        flag="download",
    )
    served_name: Annotated[str | None, ModelName] = setting(
        None, "Name of the model in the API. Default: the folder's name, or ORG/NAME.", flag="served-model-name"
    )
    served_aliases: Annotated[tuple[str, ...], ModelName] = setting(
        (), "Additional names of the model in the API.", flag="served-model-aliases"
    )
    tokenizer: str | None = setting(None, "Folder of the tokenizer. Default: the model's folder.", flag="tokenizer")
    skip_tokenizer_init: bool = setting(
        False, "Load no tokenizer; requests and responses contain token ids only.", flag="skip-tokenizer-init"
    )
    task: Annotated[Task | None, Auto] = setting(
        None, "Task of the model: generate (text), embed (vectors) or classify (class scores, relevance). auto: from the checkpoint."
    )
    pooling: Annotated[str | None, Auto] = setting(
        None,
        "Pooler of token states into the vector of a sequence, by plugin name: cls, last, mean or max. auto: from the checkpoint.",
        flag="pooling",
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
    routing_policy: Annotated[str | None, Auto] = setting(
        None, "Policy that chooses the replica of a request, by plugin name. auto: the best-ranked one.", flag="load-balance-method"
    )
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
    """The paged KV cache, the prefix cache and its tiers."""

    prefix: Annotated[str | None, Auto] = setting(
        None, "Prefix cache, by plugin name. none: no reuse. auto: the best that the model can use.", flag="prefix-cache"
    )
    eviction: str = setting("lru", "Eviction policy of the prefix cache, by plugin name.", flag="eviction-policy")
    allocator: Annotated[str | None, Auto] = setting(None, "Allocator of the KV cache's pages, by plugin name.", flag="kv-allocator")
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
    tiers: tuple[str, ...] = setting(
        (), "Tiers that keep cached prefixes outside of the device, by plugin name, nearest first: host, disk.", flag="cache-tiers"
    )
    write_policy: WritePolicy = setting(
        WRITE_POLICY,
        "When a block is stored in cache.tiers: write_through (as soon as it is computed), write_through_selective (at its second use) "
        "or write_back (when it is evicted).",
        flag="hicache-write-policy",
    )
    min_load_tokens: int = setting(
        MIN_LOAD_TOKENS,
        "Minimum number of tokens that are loaded from cache.tiers; fewer are computed again.",
        flag="min-load-tokens",
        ge=1,
    )
    events_endpoint: Annotated[str | None, Endpoint] = setting(
        None,
        "ZMQ address of KV events, in vLLM's format: tcp://*:PORT to listen, tcp://HOST:PORT to connect. They hold prompts. Default: none.",
    )
    events_replay_endpoint: Annotated[str | None, Endpoint] = setting(
        None, "ZMQ address that answers requests for earlier KV events, such as tcp://*:5558. Default: none."
    )
    events_topic: str = setting("", "Topic of KV events.")
    events_buffer_steps: int = setting(10_000, "Maximum number of batches of KV events kept for replays, in 64 MB.", ge=1)
    events_hwm: int = setting(100_000, "Maximum number of batches of KV events that wait for a subscriber.", ge=1)
    events_max_queue_size: int = setting(
        100_000, "Maximum number of changes of the prefix cache that wait to be published; beyond it, subscribers forget the cache.", ge=1
    )
    events_layout: Literal["map", "array"] = setting("map", "Form of a KV event: map (vLLM since 0.24), or array (before; AIBrix).")
    session_share: float = setting(
        SESSION_SHARE,
        "Most of the KV cache's pages that the sessions of one tenant keep after their requests have ended. 0: none are kept.",
        flag="session-share",
        ge=0.0,
        le=1.0,
    )


class DisaggregationSection(Section):
    """Servers that compute prompts, and servers that continue them."""

    mode: Literal["prefill", "decode"] | None = setting(
        None,
        "prefill: compute prompts and keep their blocks for decode servers. decode: read these blocks, and generate. Default: none; "
        "whole requests.",
        flag="disaggregation-mode",
    )
    host: str = setting(HOST, "Address of a prefill server that decode servers connect to.", flag="disaggregation-host", min_length=1)
    port: int = setting(
        PORT, "Port of that address. Only servers with the same FRAME_DIST_KEY are served.", flag="disaggregation-port", ge=1, le=65535
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
    target_itl_ms: float | None = setting(
        None,
        "Milliseconds between tokens of running requests that chunks of prompts keep within where they can, by measured steps; "
        "0: chunks have up to chunked_prefill_size tokens. Default: 50 with chunks of 2,048 tokens or more; 0 for models with experts "
        "and for Engine(...).",
        flag="target-itl-ms",
        ge=0,
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
    deterministic: bool = setting(
        False,
        "Batch-invariant mode: the bits of a token's logits depend on no other row, chunk, cache hit, preemption or draft.",
        flag="enable-deterministic-inference",
    )
    profile_dir: str | None = setting(
        None, "Folder of the traces that /start_profile writes. Default: none; /start_profile is refused.", flag="profile-dir"
    )
    check_integrity: Literal["off", "repair", "fatal"] = setting(
        "repair",
        "Action if the idle self-check of pages and slots fails: repair, fatal (end the engine); off: no self-check.",
        flag="check-integrity",
    )
    sleep: Literal["off", "wait", "refuse"] = setting(
        "off", "Allow to release memory (/sleep); requests then wait for the wake, or get 503. GPU: torch-memory-saver.", flag="sleep-mode"
    )
    weight_transfer: tuple[str, ...] = setting(
        (), "How a trainer may replace the weights by tensors: plugin names; builtin: all in-tree ones.", flag="weight-transfer"
    )
    update_timeout: float = setting(
        120.0, "Maximum seconds between two messages of a trainer; then its update ends.", flag="weight-update-timeout", gt=0, le=86400
    )
    keep_updates: str | None = setting(
        None, "Folder of a copy of a trainer's tensors for restarts, in memory below /dev/shm. Default: none.", flag="keep-updates"
    )


class SamplingSection(Section):
    """Logits processors, the sampler and grammars."""

    processors: tuple[str, ...] = setting(
        ("builtin",), "Logits processors, by plugin name and in order; builtin: all in-tree ones.", flag="logits-processors"
    )
    defaults: Annotated[dict[str, int | float] | None, Defaults, Auto] = setting(
        None,
        "Sampling parameters of requests that leave them out, as JSON; openai: none. auto: those of generation_config.json.",
        flag="sampling-defaults",
    )
    sampler: Annotated[str | None, Auto] = setting(
        None, "Sampler (draws the next tokens), by plugin name. auto: the best-ranked one that runs on the device.", flag="sampler"
    )
    grammar: Annotated[str | None, Auto] = setting(None, "Grammar backend, by plugin name.", flag="grammar-backend")
    grammar_workers: int = setting(
        2, "Number of grammar compiler processes, started on demand; 0: compile in the engine, without time and memory limits.", ge=0, le=16
    )
    grammar_mask_processes: Annotated[int | None, Auto] = setting(
        None, "Number of processes that fill the masks of grammars beside the engine; 0: the engine's threads fill them.", ge=0, le=32
    )
    grammar_timeout: float = setting(10.0, "Maximum seconds to compile one grammar, and to wait in the compilation queue.", gt=0, le=600)
    grammar_budget: float = setting(
        5.0, "Maximum CPU seconds of a request's grammar, for compilation and masks; each output token adds 2 ms.", gt=0, le=3600
    )
    grammar_memory: int = setting(1 << 30, "Maximum memory to compile one grammar, in bytes.", ge=64 << 20)
    grammar_cache: Annotated[int | None, Auto] = setting(None, "Maximum memory of the cache of compiled grammars, in bytes.", ge=0)
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


class FrameConfig(Section):
    """The whole configuration: YAML file, environment (`FRAME_SECTION__FIELD`) and flags all become
    one of these."""

    model: ModelSection = Field(default_factory=ModelSection, description="Model and weights.")
    parallel: ParallelSection = Field(default_factory=ParallelSection, description="Distribution over devices.")
    attention: AttentionSection = Field(default_factory=AttentionSection, description="Attention kernels.")
    cache: CacheSection = Field(default_factory=CacheSection, description="KV cache and prefix cache.")
    disaggregation: DisaggregationSection = Field(default_factory=DisaggregationSection, description="Prefill and decode servers.")
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection, description="Batching.")
    moe: MoESection = Field(default_factory=MoESection, description="Mixture of experts.")
    execution: ExecutionSection = Field(default_factory=ExecutionSection, description="Device and steps.")
    sampling: SamplingSection = Field(default_factory=SamplingSection, description="Logits processors, sampler, grammars.")
    speculative: SpeculativeSection = Field(default_factory=SpeculativeSection, description="Speculative decoding.")
    adapters: AdaptersSection = Field(default_factory=AdaptersSection, description="LoRA adapters.")
    media: MediaSection = Field(default_factory=MediaSection, description="Images, videos and audio.")
    text: TextSection = Field(default_factory=TextSection, description="Tokenizer, detokenizer, parsers.")
    server: ServerSection = Field(default_factory=ServerSection, description="HTTP server.")
    batches: BatchesSection = Field(default_factory=BatchesSection, description="Batch API.")
    plugins: PluginsSection = Field(default_factory=PluginsSection, description="Plugins.")
    log: LogSection = Field(default_factory=LogSection, description="Logging.")
