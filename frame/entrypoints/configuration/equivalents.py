"""Flags of vLLM, SGLang and llama.cpp that frame does not have, each with the flag to use instead.

One table: the command line prints a row when it gets such a flag, and the reference has a page of
it. Must not parse arguments or know the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

V, S, L = "vLLM", "SGLang", "llama.cpp"
VALUE = "{}"  # in `use`: the value of the other server's flag


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A flag of other servers. names: its forms. servers: that have it. use: arguments of frame, ""
    if there are none. note: what differs, or the remedy without arguments. values: of the other
    server -> of frame, for those that differ; `*`: all others."""

    names: tuple[str, ...]
    servers: tuple[str, ...]
    use: str
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def describe(self, value: str | None) -> str:
        """The remedy for the flag with this value, without a full stop."""
        if not self.use:
            return self.note
        other = self.values.get("*", value or "VALUE")
        text = f"did you mean {self.use.replace(VALUE, self.values.get(value or '', other))}?"
        return f"{text} ({self.note})" if self.note else text


_DEFAULT = "leave it out: this is what frame does by default"
_TYPES = MappingProxyType({"half": "float16", "float": "float32", "f16": "float16", "f32": "float32", "bf16": "bfloat16", "q8_0": "int8"})
_TASKS = MappingProxyType({"pooling": "embed", "embedding": "embed", "score": "classify", "reward": "classify"})
_HF_FOLDER = "set the environment variable HF_HUB_CACHE"
_LORA = "frame serves adapters in PEFT's format: --enable-lora --lora-modules NAME=FOLDER"
_MEMORY = "frame holds weights and KV cache on the device; a checkpoint of fewer bits needs less (--quantization)"
_DEVICES = "set the environment variable CUDA_VISIBLE_DEVICES"
_CONFIG = "change config.json in the checkpoint's folder"
_REQUEST = "a request has it as a sampling parameter; --sampling-defaults sets those of requests without them"

_ROWS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    # model
    ("--model-path", (S,), "--model {}", ""),
    ("-m", (L,), "--model {}", "a folder; for a .gguf file, its folder"),
    ("--tokenizer-path", (S,), "--tokenizer {}", ""),
    ("--alias -a", (L,), "--served-model-name {}", ""),
    ("--context-length", (S,), "--max-model-len {}", ""),
    ("--ctx-size -c", (L,), "--max-model-len {}", "of one sequence; --max-total-tokens sets the KV cache"),
    ("--hf-repo -hf -hfr", (L,), "--model {} --download", "safetensors"),
    ("--hf-file", (L,), "", "frame pull fetches the files that frame reads"),
    ("--revision", (V, S), "--model ORG/NAME:{}", ""),
    ("--tokenizer-revision", (V, S), "--tokenizer ORG/NAME:{}", ""),
    ("--download-dir", (V, S), "", _HF_FOLDER),
    ("--hf-token", (V, L), "", "set the environment variable HF_TOKEN"),
    ("--hf-overrides", (V,), "", _CONFIG),
    ("--json-model-override-args", (S,), "", _CONFIG),
    ("--rope-scaling --rope-theta --rope-freq-base", (V, L), "", _CONFIG),
    ("--tokenizer-mode", (V, S), "", _DEFAULT),
    ("--random-seed", (S,), "--seed {}", ""),
    ("-s", (L,), "--seed {}", ""),
    ("--lora-paths", (S,), "--enable-lora --lora-modules {}", "NAME=FOLDER, several with commas"),
    ("--max-loras-per-batch", (S,), "--max-loras {}", ""),
    ("--max-loaded-loras", (S,), "--max-cpu-loras {}", ""),
    ("--lora-target-modules --lora-backend --fully-sharded-loras", (S, V), "", _DEFAULT),
    ("--lora --lora-scaled", (L,), "", _LORA),
    ("--mmproj", (L,), "", "the encoders are read from the checkpoint's folder"),
    # task
    ("--task --runner", (V,), "--model-task {}", "generate, embed or classify"),
    ("--is-embedding", (S,), "--model-task embed", ""),
    ("--embedding --embeddings", (L,), "--model-task embed", ""),
    ("--reranking --rerank", (L,), "--model-task classify", ""),
    # parallelism
    ("--tensor-parallel-size -tp", (V, S), "--tp {}", ""),
    ("--tp-size", (S,), "--tp {}", ""),
    ("--pipeline-parallel-size -pp", (V, S), "--pp {}", ""),
    ("--pp-size", (S,), "--pp {}", ""),
    ("--data-parallel-size -dp", (V, S), "--dp {}", ""),
    ("--dp-size", (S,), "--dp {}", ""),
    ("--expert-parallel-size --ep-size", (S,), "--ep {}", ""),
    ("--enable-expert-parallel", (V,), "--ep N", "N is the value of --tp"),
    ("--distributed-executor-backend", (V,), "--launcher {}", ""),
    ("--master-addr --nccl-init-addr", (V, S), "--dist-init-addr {}:PORT", ""),
    ("--base-gpu-id --gpu-id-step", (S,), "", _DEVICES),
    ("--main-gpu -mg", (L,), "", _DEVICES),
    ("--tensor-split -ts --split-mode -sm", (L,), "--tp N", "equal shares on N devices"),
    ("--n-gpu-layers --gpu-layers -ngl", (L,), "--device {}", "all layers run on one device"),
    # memory and KV cache
    ("--gpu-memory-utilization", (V,), "--mem-fraction-static {}", ""),
    ("--kv-cache-memory-bytes --num-gpu-blocks-override", (V,), "--max-total-tokens N", "in tokens"),
    ("--block-size", (V,), "--page-size {}", ""),
    ("--cache-type-k -ctk --cache-type-v -ctv", (L,), "--kv-cache-dtype {}", "one type for keys and values"),
    ("--swap-space --cpu-offload-gb", (V, S), "", _MEMORY),
    ("--mlock --no-mmap", (L,), "", "leave it out: frame has no such choice"),
    ("--enable-prefix-caching", (V,), "", _DEFAULT),
    ("--no-enable-prefix-caching", (V,), "--prefix-cache none", ""),
    ("--radix-eviction-policy", (S,), "--eviction-policy {}", ""),
    ("--cache-reuse --cache-prompt", (L,), "", _DEFAULT),
    ("--kv-transfer-config", (V,), "--kv-offloading-size GIB", "or --disaggregation-mode prefill or decode"),
    ("--disaggregation-transfer-backend --disaggregation-ib-device", (S,), "", _DEFAULT),
    ("--disaggregation-bootstrap-port", (S,), "--disaggregation-port {}", ""),
    ("--kv-offloading-backend --hicache-io-backend --hicache-mem-layout --hicache-storage-prefetch-policy", (V, S), "", _DEFAULT),
    # scheduling
    ("--max-num-seqs", (V,), "--max-running-requests {}", ""),
    ("--parallel -np", (L,), "--max-running-requests {}", ""),
    ("--max-num-batched-tokens", (V,), "--chunked-prefill-size {}", ""),
    ("--max-prefill-tokens", (S,), "--chunked-prefill-size {}", ""),
    ("--batch-size -b --ubatch-size -ub", (L,), "--chunked-prefill-size {}", ""),
    ("--enable-chunked-prefill --cont-batching -cb", (V, L), "", _DEFAULT),
    ("--scheduling-policy", (V,), "--schedule-policy {}", ""),
    ("--schedule-conservativeness", (S,), "", "leave it out: frame preempts when the KV cache is full"),
    ("--async-scheduling", (V,), "--overlap", "on by default where it helps"),
    ("--disable-overlap-schedule", (S,), "--no-overlap", ""),
    # execution
    ("--enforce-eager", (V,), "--cuda-graph-max-bs 0 --prompt-graph-max-tokens 0", ""),
    ("--disable-cuda-graph", (S,), "--cuda-graph-max-bs 0", ""),
    ("--cuda-graph-bs", (S,), "--cuda-graph-max-bs N", "the largest of them"),
    ("--cudagraph-capture-sizes --max-cudagraph-capture-size --max-seq-len-to-capture", (V,), "--cuda-graph-max-bs N", "rows of a step"),
    ("--compilation-config -O", (V,), "--enable-torch-compile", ""),
    ("--flash-attn -fa", (L,), "", "leave it out: frame chooses; --attention-backend names another"),
    ("--prefill-attention-backend", (S,), "--attention-backend prefill={}", ""),
    ("--decode-attention-backend", (S,), "--attention-backend decode={}", ""),
    ("--sampling-backend", (S,), "", _DEFAULT),
    ("--generation-config", (V,), "--sampling-defaults {}", ""),
    ("--override-generation-config", (V,), "--sampling-defaults {}", "all of them: generation_config.json is not read then"),
    ("--moe-runner-backend", (S,), "--moe-runner {}", ""),
    ("--moe-a2a-backend --all2all-backend", (S, V), "--moe-dispatcher {}", ""),
    ("-t -tb --threads-batch", (L,), "--threads {}", ""),
    ("--skip-server-warmup --no-warmup", (S, L), "", "leave it out: frame warms up before it is ready"),
    # speculation
    ("--num-speculative-tokens", (V,), "--speculative-num-steps {}", ""),
    ("--speculative-num-draft-tokens", (S,), "--speculative-num-steps {}", ""),
    ("--draft-max --draft --draft-n", (L,), "--speculative-num-steps {}", ""),
    ("--speculative-config", (V,), "--speculative-algorithm NAME", "`frame plugins list --kind drafter`"),
    ("--model-draft -md", (L,), "--speculative-draft-model-path {}", "a folder; --speculative-algorithm names the drafter"),
    # grammars, tools and text
    ("--guided-decoding-backend --structured-outputs-config.backend", (V,), "--grammar-backend {}", ""),
    ("--enable-auto-tool-choice", (V,), "", "leave it out: tool calls are always parsed; --tool-call-parser names the parser"),
    ("--enable-reasoning", (V,), "", "leave it out: reasoning is separated by default; --reasoning-parser names the parser"),
    ("--reasoning-format", (L,), "--reasoning-parser {}", "the name of a parser, or none"),
    ("--jinja", (L,), "", _DEFAULT),
    ("--chat-template-file", (L,), "--chat-template {}", ""),
    ("--api-server-count --tokenizer-worker-num", (V, S), "--tokenizer-workers {}", ""),
    ("--grammar --grammar-file", (L,), "", "a request has it as ebnf"),
    ("--temp --top-k --top-p --min-p --repeat-penalty --predict --n-predict -n", (L,), "", _REQUEST),
    # server
    ("--admin-api-key", (S,), "--admin-key {}", ""),
    ("--api-key-file", (L,), "--api-keys {}", ""),
    ("--ssl-cert-file", (L,), "--ssl-certfile {}", ""),
    ("--ssl-key-file", (L,), "--ssl-keyfile {}", ""),
    ("--allowed-origins", (V,), "--cors-origins {}", ""),
    ("--allow-credentials", (V,), "--cors-credentials", ""),
    ("--root-path", (V,), "", "let the proxy remove the prefix from the path"),
    ("--timeout -to", (L,), "--client-timeout {}", ""),
    ("--watchdog-timeout", (S,), "--heartbeat-timeout {}", ""),
    ("--otlp-traces-endpoint", (V, S), "--otlp-endpoint {}", ""),
    ("--enable-metrics --metrics", (S, L), "", "leave it out: /metrics is always there"),
    ("--disable-log-requests --no-enable-log-requests", (V,), "", _DEFAULT),
    ("--enable-log-requests --log-requests", (V, S), "--access-log", "without prompts"),
    ("--uvicorn-log-level --log-level-http", (V, S), "--log-level {}", ""),
    ("--verbose -v", (L,), "--log-level debug", ""),
    ("--log-disable", (L,), "--log-level error", ""),
    ("--stream-interval", (V, S), "", "leave it out: each event holds all tokens that are ready"),
)
_DEFAULTS = MappingProxyType({"vllm": "openai"})
_LAYERS = MappingProxyType({"0": "cpu", "*": "cuda"})
_VALUES = MappingProxyType(  # by the first name
    {"--cache-type-k": _TYPES, "--task": _TASKS, "--n-gpu-layers": _LAYERS, "--generation-config": _DEFAULTS}
)

EQUIVALENTS: tuple[Equivalent, ...] = tuple(
    Equivalent(tuple(names.split()), servers, use, note, _VALUES.get(names.split()[0], {})) for names, servers, use, note in _ROWS
)
BY_FLAG: Mapping[str, Equivalent] = MappingProxyType({name: row for row in EQUIVALENTS for name in row.names})


def describe_flags(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """A sentence for each flag of another server in `arguments` that is none of the `known` flags
    of the command."""
    hints = []
    for number, argument in enumerate(arguments):
        if argument == "--":
            break
        name, sign, value = argument.partition("=")
        row = BY_FLAG.get(name)
        if row is None or name in known:
            continue
        following = arguments[number + 1] if number + 1 < len(arguments) else "-"
        text = value if sign else None if following.startswith("-") else following
        hints.append(f"No such option: {name} (of {' and '.join(row.servers)}); {row.describe(text)}")
    return hints


def suggest_keyword(name: str) -> str | None:
    """The keyword of `Engine(...)` for a keyword of vLLM's or SGLang's engine; None if unknown."""
    row = BY_FLAG.get(f"--{name.replace('_', '-')}")
    return row.use.split()[0].lstrip("-").replace("-", "_") if row and row.use else None
