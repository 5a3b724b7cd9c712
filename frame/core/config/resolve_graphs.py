"""Which steps run as CUDA graphs: what stands in their way, and the largest of them where the user left that open. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.config.resolve_plugins import KEYS, Choices
from frame.core.config.selection import ResolveError

if TYPE_CHECKING:
    from frame.core.config.schema import FrameConfig
    from frame.core.interfaces.model import ModelConfig, Task

MOST_DECODES = 1024  # rows of the largest graph of decodes, unless the user names another
MOST_PROMPT_TOKENS = 2048  # of the largest step with prompts; more cost graphs, and gain little on any model
# In the time that the host needs to launch a layer's kernels (0.2 ms, measured), a GPU computes as many products of a weight and a token
_PRODUCTS_PER_LAUNCHED_LAYER = 60e9
_NARROWEST = 64  # tokens; a step of fewer is bound by reading weights, and by launches if those take longer


def graph_sizes(
    chosen: Choices, config: FrameConfig, model_config: ModelConfig, device: str, task: Task, running: int
) -> list[tuple[str, int | None, int, str]]:
    """(setting, what the user gave, what to take otherwise, why) of the largest captured steps; 0 for none. Raises ResolveError when
    the user wants what cannot be."""
    execution, kinds = config.execution, ("model", "quantization_method", "moe_runner", "moe_dispatcher")
    obstacles = {
        "cuda_graph_max_bs": graph_obstacle(chosen, device, task, (*kinds, "attention_backend")),
        "prompt_graph_max_tokens": graph_obstacle(chosen, device, task, kinds)
        or ("torch_compile is set, which makes graphs of its own" if execution.torch_compile else ""),
    }
    most = {"cuda_graph_max_bs": min(running, MOST_DECODES), "prompt_graph_max_tokens": launch_bound_tokens(model_config)}
    reasons = {
        "cuda_graph_max_bs": "all batches: a replay costs the host less than launching each kernel",
        "prompt_graph_max_tokens": "about as many tokens as the device computes in the time that the host needs to launch a layer",
    }
    found = []
    for name, obstacle in obstacles.items():
        key, given = f"execution.{name}", getattr(execution, name)
        if given and obstacle:
            raise ResolveError(f"{key} is {given}, but {obstacle}.", change=f"{key}: 0")
        found.append((key, given, 0 if obstacle else most[name], f"none: {obstacle}" if obstacle else reasons[name]))
    return found


def graph_obstacle(chosen: Choices, device: str, task: Task, kinds: tuple[str, ...]) -> str:
    """Why steps cannot be captured in CUDA graphs whose work is that of plugins of `kinds`; empty when they can."""
    if device != "cuda":
        return f"CUDA graphs need a CUDA device, and the model runs on {device}"
    if task != "generate":
        return f"the task is {task}, which decodes nothing"
    for kind in kinds:
        for found in chosen.selected.get(kind, ()):
            if getattr(found.record.capabilities, "graphs", False) in (False, "none"):
                return f"{KEYS[kind]} {found.record.name} cannot be captured in a CUDA graph"
    return ""


def launch_bound_tokens(model_config: ModelConfig) -> int:
    """Up to how many tokens launching a layer takes longer than computing it, roughly; a multiple of 64."""
    tokens = int(_PRODUCTS_PER_LAUNCHED_LAYER / _layer_weights(model_config)) // _NARROWEST * _NARROWEST
    return max(_NARROWEST, min(MOST_PROMPT_TOKENS, tokens))


def _layer_weights(model_config: ModelConfig) -> int:
    """Weights that one token is multiplied with in a layer, roughly: of the attention's projections and of its experts or the one MLP."""
    config, hidden = model_config.config, model_config.hidden_size
    if model_config.kind == "mla" and model_config.latent is not None:
        ranks = sum(model_config.latent) + int(config.get("q_lora_rank") or 0)
        heads = model_config.num_heads * (model_config.head_dim + model_config.v_head_dim)
        attention = hidden * (ranks + model_config.num_heads * model_config.v_head_dim) + heads * model_config.latent[0]
    else:
        attention = hidden * (2 * model_config.num_heads + 2 * model_config.num_kv_heads) * model_config.head_dim
    inner = int(config.get("intermediate_size") or 4 * hidden)
    if model_config.num_experts:
        routed = int(config.get("num_experts_per_tok") or 1) + int(config.get("n_shared_experts") or 0)
        inner = routed * int(config.get("moe_intermediate_size") or inner)
    return attention + 3 * hidden * inner
