"""Adapters over tiny random checkpoints, and what PEFT computes with them: the oracle of the tests
of adapters.

A case is (family, target, variant). Weights depend on its name alone. Deltas are about as large as
the weights that they change, so that nearly every greedy continuation differs from the base's. Must
not know how frame reads or applies an adapter.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from frame.testing.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from peft import PeftModel

VOCABULARY = 384
INVOCATION = (300, 301, 302)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
RECURRENT = ("in_proj_qkvz", "in_proj_ba", "out_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class Target:
    """Which modules, and which parameters, an adapter changes."""

    modules: tuple[str, ...] | str = ()
    parameters: tuple[str, ...] = ()
    at: str = ""  # "": all modules of these names, else those whose name contains this
    is_plain: bool = False  # PEFT would rename layers beside the experts to the experts' parameters


def _each(*names: str, at: str = "") -> dict[str, Target]:
    return {name: Target((name,), at=at) for name in names}


_COMMON = {
    "all_linear": Target("all-linear"),
    "embed_tokens": Target(("embed_tokens",)),
    "lm_head": Target(("lm_head",)),
}
_DENSE = {**_each(*ATTENTION, *MLP), "attention": Target(ATTENTION), "mlp": Target(MLP), **_COMMON}
_DENSE["everything"] = Target((*ATTENTION, *MLP, "embed_tokens", "lm_head"))
_EXPERTS = {
    "gate_up_experts": Target(parameters=EXPERTS[:1]),
    "down_experts": Target(parameters=EXPERTS[1:]),
    "experts": Target(parameters=EXPERTS),
}
_BERT = Target(("query", "key", "value", "dense"), at="layer.")
_SHARED = Target(MLP, at="shared_expert", is_plain=True)
_BESIDE = Target((*MLA, *MLP, "embed_tokens", "lm_head"), EXPERTS, is_plain=True)


@dataclass(frozen=True)
class Family:
    """A name in `frame.testing.checkpoints` with changes, and the targets of its adapters."""

    architecture: str
    targets: dict[str, Target]
    overrides: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _DENSE),
    "llama_tied": Family("LlamaForCausalLM", {"all_linear": _COMMON["all_linear"], **_each("embed_tokens")}, {"tie_word_embeddings": True}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_each(*ATTENTION), "attention": Target(ATTENTION), **_COMMON, **_EXPERTS, "router": Target(parameters=("mlp.gate.weight",))}
        | {"everything": Target((*ATTENTION, "embed_tokens", "lm_head"), EXPERTS)},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**_each(*MLA), "mla": Target(MLA), "shared_experts": _SHARED, **_COMMON, **_EXPERTS}
        | {"dense_layer": Target(MLP, at="layers.0.mlp", is_plain=True), "mlp": Target(MLP), "everything": _BESIDE},
    ),
    "deepseek_dense": Family(
        "DeepseekV3ForCausalLM",
        {**_each("kv_b_proj", "lm_head"), "everything": Target((*MLA, *MLP, "embed_tokens", "lm_head"), is_plain=True)},
        {"first_k_dense_replace": 2},
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {**_each(*ATTENTION, *RECURRENT, "shared_expert_gate"), "recurrent": Target(RECURRENT), "shared_expert": _SHARED}
        | {**_COMMON, **_EXPERTS}
        | {"everything": Target((*ATTENTION, *RECURRENT, *MLP, "shared_expert_gate", "embed_tokens", "lm_head"), EXPERTS, is_plain=True)},
    ),
    "gemma3": Family("Gemma3ForCausalLM", _DENSE),
    "bert": Family(
        "BertModel",
        {**_each("query", "key", "value"), "dense": Target(("dense",), at="layer."), "word_embeddings": Target(("word_embeddings",))}
        | {"linear": _BERT},
    ),
    "bert_classifier": Family(
        "BertForSequenceClassification",
        {**_each("classifier"), "linear": _BERT, "pooler": Target(("dense",), at="pooler")}
        | {"everything": Target((*_BERT.modules, "classifier", "word_embeddings"))},
        {"num_labels": 3},
    ),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "r1": {"r": 1, "lora_alpha": 2},
    "r8": {"r": 8, "lora_alpha": 16},
    "r64": {"r": 64, "lora_alpha": 32},
    "names": {"r": 4, "lora_alpha": 8},  # ranks and alphas of single layers: names of `_patterns`
    "patterns": {"r": 4, "lora_alpha": 8},  # and its expressions
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "dora": {"r": 8, "lora_alpha": 16, "use_dora": True},
    "alora": {"r": 16, "lora_alpha": 16, "alora_invocation_tokens": list(INVOCATION)},
    "layer1": {"r": 8, "lora_alpha": 16, "layers_to_transform": [1]},
    "dora_rslora": {"r": 12, "lora_alpha": 8, "use_dora": True, "use_rslora": True},
}


@dataclass(frozen=True)
class Case:
    """One adapter. `seed` tells versions of the same adapter apart."""

    family: str
    target: str
    variant: str
    seed: int = 0

    @property
    def name(self) -> str:
        """The name under which an engine serves it."""
        return f"{self.target}-{self.variant}" + (f"-{self.seed}" if self.seed else "")


def cases(family: str) -> Iterator[Case]:
    """All cases of a family, those included that PEFT refuses (`NotInPeft`)."""
    for target in FAMILIES[family].targets:
        for variant in VARIANTS:
            yield Case(family, target, variant)


def make_base(family: str, folder: Path) -> Path:
    """The checkpoint of a family. Gemma 3 multiplies its embeddings, which would drown its
    layers."""
    make_checkpoint(FAMILIES[family].architecture, folder, **FAMILIES[family].overrides)
    if family == "gemma3":
        tensors = load_file(folder / "model.safetensors")
        tensors["model.embed_tokens.weight"] *= 0.1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


ROUND_SIZES: dict[str, dict[str, int]] = {  # inputs in multiples of 64
    "llama": {"intermediate_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 64, "head_dim": 32},
    "deepseek_v3": {"intermediate_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64},
}


def make_rounded(family: str, bits: int, folder: Path) -> Path:
    """A checkpoint whose projections int8 or int4, as frame quantizes while loading, hold without
    loss: what PEFT computes over it, it computes over the dequantized weights."""
    make_checkpoint(FAMILIES[family].architecture, folder, **ROUND_SIZES[family])
    tensors = load_file(folder / "model.safetensors")
    rounded = {name: _round(weight, bits) for name, weight in tensors.items() if name.endswith(("proj.weight", "mqa.weight"))}
    save_file(
        {name: tensor.contiguous() for name, tensor in {**tensors, **rounded}.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def _round(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """To 255 values of each output, or 16 of each group of 64 inputs."""
    if bits == 8:
        scale = weight.abs().amax(-1, keepdim=True) / 127
        return (weight / scale).round() * scale
    groups = weight.unflatten(-1, (-1, 64))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    return ((((groups / scale).round() + zero).clamp(0, 15) - zero) * scale).flatten(-2)


class NotInPeft(Exception):
    """PEFT does not have this combination."""


def prompts() -> list[list[int]]:
    """Of several lengths; some with the invocation tokens: first, in the middle, twice, last."""
    numbers = torch.Generator().manual_seed(5)

    def random(length: int) -> list[int]:
        return torch.randint(6, 300, (length,), generator=numbers).tolist()

    called = list(INVOCATION)
    return [
        random(1), random(37), random(100), [*called, *random(20)], [*random(18), *called, *random(9)],
        [*random(7), *called, *random(30), *called, *random(2)], [*random(33), *called],
    ]  # fmt: skip


def invocation_start(prompt: Sequence[int]) -> int | None:
    """The start of the last occurrence of the invocation tokens."""
    starts = [i for i in range(len(prompt) - len(INVOCATION) + 1) if tuple(prompt[i : i + len(INVOCATION)]) == INVOCATION]
    return starts[-1] if starts else None


class Reference:
    """An adapter in PEFT. `model` is the transformers model with the adapter's layers."""

    def __init__(self, case: Case, model: Any) -> None:
        self.case, self.model = case, model
        self.is_activated = case.variant == "alora"
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}  # engines of a test give equal tokens

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], output: Sequence[int] = ()) -> torch.Tensor:
        """Of each token of prompt and output, [tokens, vocab], computed at once. An aLoRA starts
        where the prompt says; tokens of the output do not move it."""
        key = (tuple(prompt), tuple(output))
        if key not in self._known:
            tokens = torch.tensor([[*prompt, *output]])
            self._known[key] = self.model(input_ids=tokens, **self._offsets(prompt, tokens.shape[1])).logits[0].float()
        return self._known[key]

    @torch.no_grad()
    def hidden(self, prompt: Sequence[int]) -> torch.Tensor:
        """The last hidden states of an encoder, [tokens, width]."""
        return self.model(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0]

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """With transformers' cache, token by token."""
        tokens: list[int] = []
        state = self.model(input_ids=torch.tensor([prompt]), use_cache=True, **self._offsets(prompt, len(prompt)))
        while True:
            tokens.append(int(state.logits[0, -1].argmax()))
            if len(tokens) == count:
                return tokens
            offsets = self._offsets(prompt, len(prompt) + len(tokens))
            state = self.model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=state.past_key_values, use_cache=True, **offsets)

    def _offsets(self, prompt: Sequence[int], length: int) -> dict[str, Any]:
        if not self.is_activated:
            return {}
        start = invocation_start(prompt)
        return {"alora_offsets": [None if start is None else length - start]}

    def merged(self) -> Any:
        """A copy with the deltas added to the weights: a transformers model without PEFT."""
        return copy.deepcopy(self.model).merge_and_unload()


def make_adapter(base: Any, case: Case, folder: Path) -> Reference:
    """Write the adapter of a case over `base` (a transformers model, which stays as it is). Raises
    NotInPeft."""
    from peft import LoraConfig, get_peft_model

    target = FAMILIES[case.family].targets[case.target]
    base = copy.deepcopy(base)
    keys: dict[str, Any] = {"target_modules": _modules(base, target), "target_parameters": list(target.parameters) or None}
    keys |= VARIANTS[case.variant] | _patterns(base, case, target)
    try:
        with warnings.catch_warnings(), _conversion(not target.is_plain):
            warnings.simplefilter("ignore")
            model = get_peft_model(base, LoraConfig(**keys)).eval()
            _fill(model, case)
            model.save_pretrained(str(folder))
            _check_activation(model)
    except (ValueError, NotImplementedError) as error:
        raise NotInPeft(f"{case.family} {case.name}: {error}") from None
    return Reference(case, model)


@torch.no_grad()
def make_single_experts(base: Any, case: Case, folder: Path) -> Reference:
    """The adapter of a checkpoint's experts one by one, as PEFT wrote it before they were
    fused."""
    from peft import LoraConfig

    model, tensors, rank, alpha = copy.deepcopy(base), {}, 6, 9
    for name, module in model.named_modules():
        if not name.endswith("mlp.experts"):
            continue
        for expert in range(len(module.down_proj)):
            noise, gate_up, down = _generator(f"{case}/{name}/{expert}"), module.gate_up_proj[expert], module.down_proj[expert]
            for projection, weight in zip(MLP, (*gate_up.chunk(2), down), strict=True):
                a, b = torch.randn(rank, weight.shape[1], generator=noise), torch.randn(weight.shape[0], rank, generator=noise)
                b *= 0.5 * weight.norm() / (b @ a * alpha / rank).norm()
                weight += b @ a * alpha / rank
                key = f"base_model.model.{name}.{expert}.{projection}"
                tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(MLP)).save_pretrained(str(folder))
    return Reference(case, model)


def _conversion(is_on: bool) -> Any:
    """PEFT's conversion of targets that transformers 5 fuses."""
    from peft.utils import transformers_weight_conversion

    return contextlib.nullcontext() if is_on else patch.object(transformers_weight_conversion, "_convert_peft_config_moe")


def _modules(base: Any, target: Target) -> Any:
    if isinstance(target.modules, str) or not target.at:
        return list(target.modules) if isinstance(target.modules, tuple) else target.modules
    names = [name for name, _ in base.named_modules() if name.rpartition(".")[2] in target.modules and target.at in name]
    return names or list(target.modules)


def _patterns(base: Any, case: Case, target: Target) -> dict[str, Any]:
    """Ranks and alphas of single layers, by names and by expressions. `layers_to_transform` needs
    layers."""
    if case.variant == "layer1" and (target.parameters or {"embed_tokens", "lm_head"} & {*target.modules}):
        raise NotInPeft(f"{case.family} {case.name}: layers_to_transform needs modules of layers")
    if case.variant not in ("names", "patterns"):
        return {}
    names = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)]
    first = [name for name in names if target.modules == "all-linear" or name.rpartition(".")[2] in target.modules]
    ranks, alphas = {"o_proj": 2, "mlp.experts.gate_up_proj": 5, "value": 3}, {"v_proj": 3, "down_proj": 5, "mlp.experts.down_proj": 6}
    if case.variant == "patterns":
        ranks = {r".*\.1\..*(q_proj|down_proj|query|qkvz|q_b_proj)": 24, r".*(o_proj|up_proj|value|ba|kv_b_proj)": 2}
        alphas = {r".*\.1\..*(k_proj|gate_proj|key|kv_a_proj_with_mqa)": 24, r".*(v_proj|down_proj|out_proj)": 3}
        if target.parameters:
            ranks |= {r".*\.experts\.gate_up_proj": 5, r".*\.1\.mlp\.experts\.down_proj": 12}
            alphas |= {r".*\.experts\.down_proj": 6}
    if first and first[0].rpartition(".")[2] not in ranks:  # PEFT sorts the keys when it saves, and takes the first that fits
        ranks[first[0]] = 17
    return {"rank_pattern": ranks, "alpha_pattern": alphas}


def _check_activation(model: PeftModel) -> None:
    """PEFT activates aLoRA in linear layers alone; elsewhere it would ignore the setting."""
    from peft.tuners.lora import LoraLayer

    if model.peft_config["default"].alora_invocation_tokens is not None:
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer) and not module.lora_variant:
                raise ValueError(f"{name}: no aLoRA in {type(module).__name__}")
        try:
            model(input_ids=torch.tensor([[6, 7, 8]]), alora_offsets=[2])
        except IndexError as error:  # layers of models that flatten their tokens
            raise ValueError(f"no aLoRA in layers with flat tokens: {error}") from None


@torch.no_grad()
def _fill(model: PeftModel, case: Case) -> None:
    """Random factors, with B such that the delta has about the norm of its weight."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        noise = _generator(f"{case.family}/{case.name}/{name}")
        pairs = [(module.lora_A, module.lora_B)] if len(module.lora_A) else [(module.lora_embedding_A, module.lora_embedding_B)]
        for first, second in pairs:
            for layer in (first["default"], second["default"]):
                weight = getattr(layer, "weight", layer)
                weight.copy_(torch.randn(weight.shape, generator=noise))
            weight = getattr(module.get_base_layer(), module.parameter_name if isinstance(module, ParamWrapper) else "weight")
            size = 0.5 * weight.norm() / module.get_delta_weight("default").norm()
            getattr(second["default"], "weight", second["default"]).mul_(size)
        if "default" in (module.lora_magnitude_vector or ()):
            magnitude = module.lora_magnitude_vector["default"]
            magnitude.weight.mul_(0.6 + 0.8 * torch.rand(magnitude.weight.shape, generator=noise))


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little"))


ERRORS = {
    "alpha doubled": "all_linear-r8",
    "alpha forgotten": "q_proj-r8",
    "sign": "v_proj-r8",
    "k and v exchanged": "attention-r8",
    "gate and up exchanged": "mlp-r8",
    "magnitude forgotten": "o_proj-dora",
    "one layer skipped": "down_proj-r8",
    "expert shifted": "experts-r8",
}  # what a wrong implementation may do -> the case that shows it


def change_adapter(source: Path, folder: Path, error: str) -> None:
    """A copy of an adapter as a wrong implementation would read it."""
    config, tensors = json.loads((source / "adapter_config.json").read_text()), load_file(source / "adapter_model.safetensors")
    if error == "alpha doubled":
        config["lora_alpha"] *= 2
    elif error == "alpha forgotten":
        config["lora_alpha"] = config["r"]
    elif error == "sign":
        tensors = {name: -tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}
    elif error == "k and v exchanged":
        swap = {"k_proj": "v_proj", "v_proj": "k_proj"}
        tensors = {".".join(swap.get(part, part) for part in name.split(".")): tensor for name, tensor in tensors.items()}
    elif error == "gate and up exchanged":
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        tensors = {".".join(swap.get(part, part) for part in name.split(".")): tensor for name, tensor in tensors.items()}
    elif error == "expert shifted":
        rank = config["r"]
        tensors = {name: tensor.roll(rank, 0) if "experts" in name and "lora_A" in name else tensor for name, tensor in tensors.items()}
    elif error == "magnitude forgotten":
        config["use_dora"] = False
        tensors = {name: tensor for name, tensor in tensors.items() if "magnitude" not in name}
    elif error == "one layer skipped":
        tensors = {name: tensor * (".layers.1." not in name) for name, tensor in tensors.items()}
    else:
        raise ValueError(error)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def load_adapter(base: Any, case: Case, folder: Path) -> Reference:
    """An adapter's files as PEFT reads them."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Reference(case, PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval())
