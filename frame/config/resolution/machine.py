"""The parts of `resolve` that follow from the machine: dtypes, tensor parallelism, sizes
and CUDA graphs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frame.config.hardware import Hardware
from frame.config.resolution.platform import get_capabilities
from frame.config.resolution.plugins import KEYS, Choices
from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError
from frame.core.interfaces.model import ModelConfig, Task, find_dense_layers
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.plugin import PluginRecord

GIB = 1024**3
RUNNING_ON_CPU = 64  # default of scheduler.max_running_requests on a CPU
MIN_RUNNING, MAX_RUNNING = 256, 512  # bounds of the default of scheduler.max_running_requests on a GPU
TOKENS_A_REQUEST = 1024  # prompt and output of a typical request
MAX_DECODES = 1024  # default bound on the rows of the largest captured decode
MAX_PROMPT_TOKENS = 2048  # default bound on the tokens of the largest captured step with prompts; more gain little on any model
MIN_MASK_PROCESSES, MAX_MASK_PROCESSES = 4, 8  # of sampling.grammar_mask_processes, where its default is not 0
MIN_GRAMMAR_CACHE, MAX_GRAMMAR_CACHE = GIB // 4, 2 * GIB  # bytes; a schema that is often used takes 10 to 30 MiB
MASK_PROCESS_ROWS = 64  # running requests from which on masks are filled in processes
# Products of a weight and a token that a GPU computes while the host launches one layer's kernels
# beside HTTP and grammars (0.4 ms, measured; 0.2 on an idle host).
_GEMMS_PER_LAUNCHED_LAYER = 120e9
_NARROWEST = 64  # tokens; a smaller step is bound by reading weights or by launches
_LAYER_KINDS = ("layers_block_type", "hybrid_override_pattern")  # fields of configs whose layers are attention, a recurrence or an MLP
_ONLY_DECODES = {  # capabilities of models whose steps with prompts cannot be captured
    "sparse": "sparse attention selects keys by the rows of a step, outside of the attention backend",
    "cross_attention": "the encoder runs in steps with prompts",
}
_EXPERTS_EVERY = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq")  # fields: the distance of layers with experts
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "int8": 1}


def dtypes_to_try(config: FrameConfig, hardware: Hardware, model_config: ModelConfig, platform: PluginRecord) -> list[tuple[str, str]]:
    """Computing dtypes to try, best first, each with its reason."""
    if config.model.dtype is not None:
        return [(config.model.dtype, "")]
    if get_capabilities(platform).is_host:
        plain = ("float32", "exact, and every CPU computes it well")
        feature = hardware.bf16_feature
        if model_config.dtype == "bfloat16" and feature:
            return [("bfloat16", f"the checkpoint is bfloat16 and this CPU multiplies it natively ({feature})"), plain]
        if model_config.dtype == "bfloat16":
            return [("float32", "the checkpoint is bfloat16, but this CPU does not multiply it natively")]
        return [plain]
    if model_config.dtype == "bfloat16" and any(a.compute_capability and a.compute_capability < (8, 0) for a in hardware.of(platform.name)):
        return [
            ("float16", "the checkpoint is bfloat16, which this GPU (compute capability below 8.0) does not compute"),
            ("float32", "exact"),
        ]
    others = [
        (dtype, "computed in another type than the checkpoint's")
        for dtype in ("bfloat16", "float16", "float32")
        if dtype != model_config.dtype
    ]
    return [(model_config.dtype, "the checkpoint's type"), *others]


def indivisible(model_config: ModelConfig, plan: ParallelPlan) -> list[str]:
    """The parts of the model that `plan.attention_tp` ranks cannot share equally. KV heads may be
    repeated if that is a multiple of their number."""
    tp = plan.attention_tp
    uneven = [f"{model_config.num_heads} attention heads"] if model_config.num_heads % tp else []
    if model_config.kind == "mha" and model_config.num_kv_heads % tp and tp % model_config.num_kv_heads:
        uneven.append(f"{model_config.num_kv_heads} KV heads")
    names = {
        "intermediate_size": "the inner size",
        "moe_intermediate_size": "the experts' inner size",
        "shared_expert_intermediate_size": "the shared expert's inner size",
    }
    for name, words in names.items():
        size = model_config.config.get(name)
        if name == "moe_intermediate_size" and plan.ep > 1:  # experts are whole
            continue
        if isinstance(size, int) and size % tp:
            uneven.append(f"{words} {size}")
    return uneven


def estimate_cache_tokens(config: FrameConfig, model_config: ModelConfig, memory: int, kv_dtype: str) -> int:
    """Estimate the tokens in each rank's KV cache from `memory` (bytes) and the weights' size. The
    real number is computed after loading (`frame.loading.capacity`)."""
    if config.cache.max_total_tokens is not None:
        return config.cache.max_total_tokens
    tp, pp, bytes_a_value = config.parallel.tp, config.parallel.pp, _BYTES[kv_dtype]
    if model_config.kind == "mla" and model_config.latent is not None:
        token = -(-model_config.num_layers // pp) * sum(model_config.latent) * bytes_a_value
    else:
        token = (
            -(-model_config.num_layers // pp)
            * max(1, model_config.num_kv_heads // tp)
            * (model_config.head_dim + model_config.v_head_dim)
            * bytes_a_value
        )
    share = 0.9 if config.cache.mem_fraction is None else config.cache.mem_fraction
    return max(0, int(memory * share - count_weights(model_config, config.model.quantization) / (tp * pp))) // token


def _count_expert_layers(config: Mapping[str, Any], layers: int) -> int:
    """The least number of the `layers` after the dense ones that have experts."""
    every = max((config[name] for name in _EXPERTS_EVERY if isinstance(config.get(name), int)), default=1)
    return max(0, layers // max(1, every) - len(config.get("mlp_only_layers") or ()))


def count_weights(model_config: ModelConfig, chosen_format: str | None) -> int:
    """The least bytes that the weights take, without building the model, which `MemoryPlan` counts:
    attention, MLPs, experts, embedding and head; a quantized weight takes half a byte, unless it is
    float8. Layers of one part each (Nemotron-H) are left out, and where experts are in some layers
    only, the MLPs of the others. `chosen_format`: the user's weight format, which may quantize
    while loading."""
    config, hidden, layers = model_config.config, model_config.hidden_size, model_config.num_layers
    experts, inner = model_config.num_experts, int(config.get("intermediate_size") or 0)
    values = model_config.vocab_size * hidden * (1 if config.get("tie_word_embeddings") else 2)
    if not any(config.get(name) for name in _LAYER_KINDS):
        dense = len(find_dense_layers(config, layers)) if experts else layers
        routed = experts * int(config.get("moe_intermediate_size") or inner)
        with_experts = _count_expert_layers(config, layers - dense)
        values += layers * _attention_weights(model_config) + 3 * hidden * (dense * inner + with_experts * routed)
    stored = chosen_format or model_config.quantization or "none"
    width = _BYTES.get(model_config.dtype, 2) if stored == "none" else 1 if "fp8" in stored else 0.5
    return int(values * width)


def _choose_running(tokens: int) -> tuple[int, str]:
    """The default of max_running_requests on a GPU whose KV cache holds `tokens` tokens, and the
    reason."""
    fitting = tokens // TOKENS_A_REQUEST // 64 * 64
    running = min(max(fitting, MIN_RUNNING), MAX_RUNNING)
    why = f"the KV cache holds about {tokens} tokens, {TOKENS_A_REQUEST} for each; from {MIN_RUNNING} to {MAX_RUNNING}"
    return running, why


def budgets(
    config: FrameConfig, hardware: Hardware, platform: PluginRecord, model_config: ModelConfig, kv_dtype: str
) -> list[tuple[str, Any, Any, str]]:
    """(setting, user's value, default, reason) of each size that follows from the machine's cores
    and memory."""
    parallel, scheduler = config.parallel, config.scheduler
    ranks, on_cpu = parallel.tp * parallel.pp * (1 if parallel.dp_attention else parallel.dp), get_capabilities(platform).is_host
    memory = min((a.memory_bytes for a in hardware.of(platform.name)), default=hardware.memory_bytes)
    machine = "a CPU" if on_cpu else f"a device with {memory // GIB} GiB"
    chunk = 2048 if on_cpu or memory < 40 * GIB else 8192
    running, room = RUNNING_ON_CPU, f"as many as {machine} runs well"
    if not on_cpu:
        running, room = _choose_running(estimate_cache_tokens(config, model_config, memory, kv_dtype))
    threads = max(1, (hardware.cpu_cores - hardware.busy_cores) // ranks) if on_cpu else None
    if on_cpu:
        overlap, memory_share = "host and model share the cores, so overlap gains nothing", "leaves half the memory to others"
        overlap = "a stage computes while the next one does" if config.parallel.pp > 1 else overlap
    else:
        overlap, memory_share = "the host schedules while the device computes", "leaves a tenth for workspaces"
    # Threads that meet at barriers wait for each other most of the time if another process uses
    # their cores.
    kept = f", {hardware.busy_cores} of them for HTTP and text" if hardware.busy_cores else ""
    cores = f"{hardware.cpu_cores} core(s) for {ranks} rank(s){kept}" if on_cpu else "left to torch: the model runs on the device"
    return [
        ("scheduler.chunked_prefill_size", scheduler.chunked_prefill_size, chunk, f"keeps decodes going on {machine}"),
        ("scheduler.max_running_requests", scheduler.max_running_requests, running, room),
        ("scheduler.overlap", scheduler.overlap, not on_cpu or config.parallel.pp > 1, overlap),
        ("cache.mem_fraction", config.cache.mem_fraction, 0.5 if on_cpu else 0.9, memory_share),
        ("execution.threads", config.execution.threads, threads, cores),
    ]


def choose_graph_sizes(
    chosen: Choices, config: FrameConfig, model_config: ModelConfig, platform: PluginRecord, task: Task, tokens: int
) -> list[tuple[str, int | None, int, str]]:
    """(setting, user's value, default, reason) of the largest steps captured as CUDA graphs; 0:
    none. tokens: of a decode step, at most. Raises ResolveError if the user sets a size where
    nothing can be captured."""
    stages = config.parallel.pp
    several = f"parallel.pp is {stages}, and stages exchange tensors in the middle of a step" if stages > 1 else ""
    execution, kinds = config.execution, ("collective", "model", "gemm_kernel", "moe_runner", "moe_dispatcher")
    models = [selection.record.capabilities for selection in chosen.selected.get("model", ())]
    obstacles = {
        "cuda_graph_max_bs": graph_obstacle(chosen, platform, task, (*kinds, "attention_backend")),
        "prompt_graph_max_tokens": several
        or graph_obstacle(chosen, platform, task, kinds)
        or ("torch_compile is set, which captures its own graphs" if execution.torch_compile else "")
        or next((why for name, why in _ONLY_DECODES.items() if any(getattr(can, name, False) for can in models)), ""),
    }
    maximum = {"cuda_graph_max_bs": min(tokens, MAX_DECODES), "prompt_graph_max_tokens": launch_bound_tokens(model_config)}
    reasons = {
        "cuda_graph_max_bs": f"all {'micro-' if stages > 1 else ''}batches: a replay costs the host less than launching each kernel",
        "prompt_graph_max_tokens": "about as many tokens as the device computes while the host launches a layer",
    }
    explicit = {"cuda_graph_max_bs": execution.cuda_graph_max_bs, "prompt_graph_max_tokens": execution.prompt_graph_max_tokens}
    sizes = []
    for name, obstacle in obstacles.items():
        key, value = f"execution.{name}", explicit[name]
        if value and obstacle:
            raise ResolveError(f"{key} is {value}, but {obstacle}.", change=f"{key}: 0")
        sizes.append((key, value, 0 if obstacle else maximum[name], f"none: {obstacle}" if obstacle else reasons[name]))
    return sizes


def graph_obstacle(chosen: Choices, platform: PluginRecord, task: Task, kinds: tuple[str, ...]) -> str:
    """Why steps that run plugins of `kinds` cannot be captured as CUDA graphs; empty if they
    can."""
    if not get_capabilities(platform).graphs:
        return f"the platform {platform.name} captures no graphs"
    if task != "generate":
        return f"the task is {task}, which does not decode"
    for kind in kinds:
        for selection in chosen.selected.get(kind, ()):
            can = selection.record.capabilities
            if getattr(can, "capturable" if kind == "collective" else "graphs", False) in (False, "none"):
                return f"{KEYS[kind]} {selection.record.name} cannot be captured in a CUDA graph"
    return ""


def launch_bound_tokens(model_config: ModelConfig) -> int:
    """Estimate the tokens up to which launching a layer takes longer than computing it; a multiple
    of 64."""
    tokens = int(_GEMMS_PER_LAUNCHED_LAYER / _layer_weights(model_config)) // _NARROWEST * _NARROWEST
    return max(_NARROWEST, min(MAX_PROMPT_TOKENS, tokens))


def _layer_weights(model_config: ModelConfig) -> int:
    """Estimate the weights of a layer that one token is multiplied with: attention projections, and
    its experts or the MLP."""
    config, hidden = model_config.config, model_config.hidden_size
    inner = int(config.get("intermediate_size") or 4 * hidden)
    if model_config.num_experts:
        routed = int(config.get("num_experts_per_tok") or 1) + int(config.get("n_shared_experts") or 0)
        inner = routed * int(config.get("moe_intermediate_size") or inner)
    return _attention_weights(model_config) + 3 * hidden * inner


def _attention_weights(model_config: ModelConfig) -> int:
    """The weights of a layer's attention projections."""
    hidden = model_config.hidden_size
    if model_config.kind == "mla" and model_config.latent is not None:
        ranks = sum(model_config.latent) + int(model_config.config.get("q_lora_rank") or 0)
        heads = model_config.num_heads * (model_config.head_dim + model_config.v_head_dim)
        return hidden * (ranks + model_config.num_heads * model_config.v_head_dim) + heads * model_config.latent[0]
    return hidden * (2 * model_config.num_heads + 2 * model_config.num_kv_heads) * model_config.head_dim


def choose_grammar_sizes(
    config: FrameConfig, hardware: Hardware, platform: PluginRecord, sizes: Mapping[str, int]
) -> list[tuple[str, int | None, int, str]]:
    """(setting, user's value, default, reason) of the fewest forced tokens in a row that are
    computed in one step, of the processes that fill masks and of the cache of grammars. sizes: of
    steps, by name."""
    jump, why_jump = 2, "a row of several tokens costs a step little more than one of one"
    if sizes["cuda_graph_max_bs"]:
        jump, why_jump = 3, "a run takes as many rows of the step's CUDA graph as it has tokens"
    parallel, sampling = config.parallel, config.sampling
    processes = min(MAX_MASK_PROCESSES, hardware.cpu_cores // (2 * parallel.dp))
    if config.speculative.algorithm is not None or parallel.dp_attention:
        processes, why = 0, "the engine's threads: processes take no drafts and no attention groups"
    elif not sampling.grammar_workers:
        processes, why = 0, "the engine's threads, as sampling.grammar_workers is 0"
    elif get_capabilities(platform).is_host:
        processes, why = 0, "the engine's threads: the model computes on the same cores"
    elif processes < MIN_MASK_PROCESSES:
        processes, why = 0, f"the engine's threads: {hardware.cpu_cores} cores are few"
    elif sizes["max_running_requests"] < MASK_PROCESS_ROWS:
        processes, why = 0, f"the engine's threads: fewer than {MASK_PROCESS_ROWS} requests run at a time"
    else:
        why = "half of the cores: masks of many requests hold the interpreter's lock"
    cache = min(max(hardware.memory_bytes // (128 * parallel.dp), MIN_GRAMMAR_CACHE), MAX_GRAMMAR_CACHE)
    return [
        ("sampling.jump_forward", sampling.jump_forward, jump, why_jump),
        ("sampling.grammar_cache", sampling.grammar_cache, cache, "a 128th of the host's memory, from 256 MiB to 2 GiB"),
        ("sampling.grammar_mask_processes", sampling.grammar_mask_processes, processes, why),
    ]
