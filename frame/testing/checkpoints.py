"""Tiny random checkpoints in Hugging Face layout, saved by transformers itself, each with a
tokenizer and a chat template.

Used by tests of models and by plugin authors. Equal arguments give equal bytes. transformers is
imported when the first one is made. Must not know how frame loads or runs a model.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from frame.core.errors import did_you_mean

if TYPE_CHECKING:
    import torch

_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
_DEEPSEEK = {**_MOE, **_MLA, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}

# with few heads, ReLU gives several keys the score 0, and any of them may be selected
_DSA = {**_DEEPSEEK, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 12, "norm_topk_prob": True}
_DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 12, "no_rope_layers": [1, 0],
    "moe_layers": [1], "floor_scale": 8,
}  # fmt: skip
_KIMI = {
    **_MLA, "q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "head_dim": 16, "n_routed_experts": 8,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
_FALCON_H1 = {
    "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 1, "lm_head_multiplier": 0.8,
    "embedding_multiplier": 1.5, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6, "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9, "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8,
}  # fmt: skip
_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": 24, "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384, "use_double_wide_mlp": True,
}  # fmt: skip
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
_ALTERNATING = ["sliding_attention", "full_attention"]
_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

# architecture name as in config.json -> (transformers' model type, what differs from `_BASE`)
TINY: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("llama", {}),
        "MistralForCausalLM": ("mistral", {"sliding_window": None}),
        "Qwen2ForCausalLM": ("qwen2", {}),
        "Qwen3ForCausalLM": ("qwen3", {"head_dim": 24}),
        "MixtralForCausalLM": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "Qwen2MoeForCausalLM": ("qwen2_moe", {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 48}),
        "Qwen3MoeForCausalLM": ("qwen3_moe", {**_MOE, "num_experts": 8, "head_dim": 24, "norm_topk_prob": True}),
        "DeepseekV2ForCausalLM": ("deepseek_v2", {**_DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
        "DeepseekV3ForCausalLM": ("deepseek_v3", {**_DEEPSEEK, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
        "DeepseekV32ForCausalLM": ("deepseek_v32", {**_DSA, "n_group": 4, "topk_group": 2}),
        "GlmMoeDsaForCausalLM": ("glm_moe_dsa", {**_DSA, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}),
        "Gemma2ForCausalLM": ("gemma2", {**_GEMMA, "sliding_window": 32}),
        "Gemma3ForCausalLM": ("gemma3_text", {**_GEMMA, "sliding_window": 24, "layer_types": _ALTERNATING}),
        "Gemma4ForCausalLM": ("gemma4_text", _GEMMA4),
        "Phi3ForCausalLM": ("phi3", {}),
        "StableLmForCausalLM": ("stablelm", {}),
        "GraniteForCausalLM": ("granite", {}),
        "GraniteMoeForCausalLM": ("granitemoe", {"num_local_experts": 4}),
        "PhimoeForCausalLM": ("phimoe", {"num_local_experts": 4}),
        "SeedOssForCausalLM": ("seed_oss", {"head_dim": 16}),
        "Exaone4ForCausalLM": ("exaone4", {"sliding_window": 24, "num_hidden_layers": 4}),
        "OlmoeForCausalLM": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
        "Olmo2ForCausalLM": ("olmo2", {}),
        "Olmo3ForCausalLM": ("olmo3", {"sliding_window": 24, "num_hidden_layers": 4}),
        "CohereForCausalLM": ("cohere", {"use_qk_norm": True}),
        "Cohere2ForCausalLM": ("cohere2", {"sliding_window": 24, "num_hidden_layers": 4}),
        "Glm4MoeForCausalLM": ("glm4_moe", {**_MOE, "n_routed_experts": 8, "routed_scaling_factor": 1.5, "use_qk_norm": True}),
        "MiniMaxM2ForCausalLM": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
        "MinistralForCausalLM": ("ministral", {"sliding_window": 24, "head_dim": 16, "layer_types": _ALTERNATING}),
        "Ministral3ForCausalLM": ("ministral3", {"rope_parameters": _MINISTRAL3_ROPE, "sliding_window": None}),
        "Qwen3NextForCausalLM": (
            "qwen3_next",
            {**_MOE, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
        ),
        "Llama4ForCausalLM": ("llama4_text", _LLAMA4),
        "KimiLinearForCausalLM": ("kimi_linear", _KIMI),
        "NemotronHForCausalLM": ("nemotron_h", _NEMOTRON),
        "FalconH1ForCausalLM": ("falcon_h1", _FALCON_H1),
        "Qwen3_5ForCausalLM": ("qwen3_5_text", _DELTA),
        "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", {**_MOE, **_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 48}),
        "GptOssForCausalLM": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 24}),
        "NemotronForCausalLM": ("nemotron", {}),
        "Jais2ForCausalLM": ("jais2", {}),
        "ApertusForCausalLM": ("apertus", {}),
        "Ernie4_5ForCausalLM": ("ernie4_5", {}),
        "GPT2LMHeadModel": ("gpt2", {"num_key_value_heads": 4}),
        "BertModel": ("bert", {"max_position_embeddings": 512}),
        "RobertaModel": ("roberta", {"max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1}),
    }
)

_BASE = MappingProxyType(
    {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
)
# `from_pretrained` replaces methods of transformers while it runs, and threads load references
LOADING = threading.Lock()
_SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. A request walks through the house once, and a stranger can add a room.",
    "def greet(name):\n    return f'hello, {name}'\n\nfor number in range(10):\n    print(greet(number))\n",
    "What is the capital of France? The capital of France is Paris. One, two, three, four, five. 0 1 2 3 4 5 6 7 8 9",
    '{"name": "value", "list": [1, 2, 3], "true": false}\n',
)
_CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_checkpoint(
    architecture: str, folder: str | Path, seed: int = 0, *, dtype: str = "float32", max_shard_size: str = "5GB", **overrides: Any
) -> Path:
    """Write a checkpoint of `architecture` to `folder` and return the folder: a name in `TINY`, or
    one of its bodies and classifiers (`LlamaModel`, `BertForSequenceClassification`).

    Weights depend on (seed, parameter name, shape) alone and are scaled so that logits have a
    standard deviation of about 3. `overrides` are fields of the transformers config; None-valued
    ones are set to None. Raises ValueError for an unknown name, with those that are known.
    """
    import torch
    from transformers import CONFIG_MAPPING

    model_type, changes = TINY[architecture] if architecture in TINY else TINY[_relative(architecture)]
    # a copy: transformers adds keys to the rotary settings that it is handed
    config = CONFIG_MAPPING[model_type](**copy.deepcopy({**_BASE, **changes, **overrides}))
    config.architectures = [architecture]
    model = _auto_class(architecture).from_config(config, attn_implementation="eager", trust_remote_code=False).to(torch.float32)
    set_weights(model, seed)
    folder = Path(folder)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder, config.max_position_embeddings)
    return folder


def load_reference(folder: str | Path) -> Any:
    """The checkpoint as transformers runs it: float32, eager attention, on the CPU, in eval
    mode."""
    import torch
    from transformers import AutoConfig

    architecture = AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures[0]
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with LOADING:
        return _auto_class(architecture).from_pretrained(folder, trust_remote_code=False, **options).eval()


def _relative(architecture: str) -> str:
    """The name in `TINY` of another form of the same model. Raises ValueError."""
    family = architecture.removesuffix("ForSequenceClassification").removesuffix("Model")
    for name in (f"{family}ForCausalLM", f"{family}Model"):
        if name in TINY:
            return name
    hint = did_you_mean(architecture, TINY) or "."
    raise ValueError(f"{architecture!r} is no architecture that make_checkpoint can write{hint} Names: {', '.join(sorted(TINY))}.")


def _auto_class(architecture: str) -> Any:
    import transformers

    if architecture.endswith("ForSequenceClassification"):
        return transformers.AutoModelForSequenceClassification
    is_body = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return transformers.AutoModel if is_body else transformers.AutoModelForCausalLM


def set_weights(model: Any, seed: int) -> None:
    """Set the weights of a model of transformers; see `make_checkpoint`."""
    import torch

    is_centred = type(model).__name__.startswith(("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5"))  # their norms multiply by 1 + weight
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=_generator(seed, name), dtype=torch.float32)
            tensor.copy_(_scaled(name, noise, is_centred and "vis" not in name))
    model.tie_weights()


def _scaled(name: str, noise: torch.Tensor, zero_centred: bool) -> torch.Tensor:
    if noise.dim() < 2:
        is_factor = (name.endswith("weight") and not zero_centred) or name.endswith(("layer_scalar", "router.scale", "expert_scale"))
        return noise * 0.1 + (1.0 if is_factor else 0.0)
    fan_in = noise[0].numel() if noise.dim() > 3 else noise.shape[-1]  # all but the outputs of an image's patches
    if "embed" in name or "lm_head" in name or "wte" in name:
        return noise * 3.0 / fan_in**0.5
    router = name.endswith(("gate.weight", "router.weight"))  # a sharper choice of experts keeps rounding from flipping it
    return noise * (2.0 if router else 1.0) / fan_in**0.5


def _generator(seed: int, name: str) -> torch.Generator:
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def save_tokenizer(
    folder: str | Path,
    max_length: int,
    special: Sequence[str] = _SPECIAL,
    chat_template: str = _CHAT_TEMPLATE,
    named: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Write a byte-level BPE over all 256 bytes, so that any text round-trips: special tokens, 256
    bytes, and merges up to 384 tokens in all. special: first those of beginning, end and padding.
    named: attributes of the tokenizer for further ones. -> the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    names = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[2]}
    more = {"extra_special_tokens": dict(named)} if named else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, model_max_length=max_length, **more)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast
