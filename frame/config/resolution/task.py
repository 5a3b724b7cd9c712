"""The parts of `resolve` that choose the task and how a sequence's vector is pooled. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError
from frame.core.interfaces.drafter import TreeShape
from frame.core.interfaces.model import Activation, ModelCapabilities, ModelConfig, Pooling, Task, checkpoint_tasks, is_classifier

_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}  # by class of torch.nn


def choose_task(config: FrameConfig, model_config: ModelConfig) -> tuple[Task, str]:
    """The task, and the reason if the user left it open. Raises ResolveError for a task that the
    checkpoint has no head for, and for settings that the task does not use."""
    task, why = _task(config, model_config)
    takes_labels = task == "classify" and not is_classifier(model_config.architecture)
    for key, value, taken, without in (
        ("pooling", config.model.pooling, task != "generate", "auto"),
        ("label_tokens", ",".join(config.model.label_tokens), takes_labels, "[]"),
    ):
        if value and not taken:
            sentence = f"model.{key} is {value}, which {model_config.architecture} does not use for the task {task}."
            raise ResolveError(sentence, change=f"model.{key}: {without}")
    return task, why


def _task(config: FrameConfig, model_config: ModelConfig) -> tuple[Task, str]:
    possible, explicit = checkpoint_tasks(model_config.architecture), config.model.task
    if explicit is not None:
        if explicit not in possible:
            raise ResolveError(
                f"model.task is {explicit}, but a checkpoint of {model_config.architecture} can only {' or '.join(possible)}.",
                change=f"model.task: {possible[0]}",
            )
        return explicit, ""
    if "generate" in possible and config.model.label_tokens:
        return "classify", "label tokens are set"
    if "embed" in possible and model_config.sentence is not None:
        return "embed", "the folder is one of sentence-transformers"
    if "embed" in possible and _attends_both_ways(model_config):
        return "embed", "config.json has is_causal: false"
    return possible[0], f"what a checkpoint of {model_config.architecture} is for"


def _attends_both_ways(model_config: ModelConfig) -> bool:
    return model_config.config.get("is_causal") is False


def is_encoder(capabilities: ModelCapabilities, model_config: ModelConfig) -> bool:
    """Whether the model's tokens attend to later ones too."""
    key = capabilities.encoder
    return model_config.config.get(key) is False if isinstance(key, str) else key


def choose_pooling(config: FrameConfig, model_config: ModelConfig, task: Task) -> tuple[Pooling, str]:
    """How a sequence's vector is pooled for the task embed or classify, and the reason."""
    if task == "embed":
        sentence = model_config.sentence
        stored = None if sentence is None else sentence.mode
        mode, why = _mode(
            config, stored or ("mean" if model_config.encoder else "last"), "1_Pooling/config.json" if stored else _usual(model_config)
        )
        return Pooling(mode, normalize=True if sentence is None else sentence.normalize), why
    tokens = config.model.label_tokens
    mode, why = _mode(config, "cls" if model_config.encoder else "last", _usual(model_config))
    if is_classifier(model_config.architecture):
        return Pooling(mode, activation=_choose_activation(model_config)), why
    if len(tokens) < 2:
        raise ResolveError(
            f"model.task is classify, but {model_config.architecture} has no head over labels: name the tokens that stand for them.",
            change="model.label_tokens: [no, yes]",
        )
    return Pooling(mode, activation="softmax", label_tokens=tokens), why


def _choose_activation(model_config: ModelConfig) -> Activation:
    """What follows a classifier's head: what sentence-transformers wrote of a cross-encoder, or
    what transformers' pipeline chooses by `problem_type` and the number of labels."""
    stored = model_config.config.get("sentence_transformers")
    named = stored.get("activation_fn") if isinstance(stored, Mapping) else None
    named = named or model_config.config.get("sbert_ce_default_activation_function")
    if named:
        activation = _ACTIVATIONS.get(str(named).rpartition(".")[2])
        if activation is None:
            known = ", ".join(_ACTIVATIONS)
            raise ResolveError(f"config.json has the activation_fn {named}, which is not supported; set one of {known} there.")
        return activation
    kind = model_config.config.get("problem_type")
    if kind == "regression":
        return "none"
    return "sigmoid" if model_config.num_labels == 1 or kind == "multi_label_classification" else "softmax"


def check_step(config: FrameConfig, chunk: int, max_context: int) -> None:
    """Raise ResolveError unless a step of `chunk` tokens holds a prompt of `max_context` tokens,
    which is computed in one step."""
    if chunk < max_context:
        raise ResolveError(
            f"scheduler.chunked_prefill_size is {chunk}, but this model computes a prompt of up to {max_context} tokens in one step.",
            change=f"scheduler.chunked_prefill_size: {max_context}" if config.model.max_context else f"model.max_context: {chunk}",
        )


def find_adapter_conflicts(config: FrameConfig, model_config: ModelConfig) -> Iterator[ResolveError]:
    """What stands against adapters."""
    adapters = config.adapters
    named = next((name for name in ("modules", "folders", "uploads") if getattr(adapters, name)), None)
    if not adapters.enabled:
        if named is not None:
            sentence = f"adapters.{named} is set, but adapters.enabled is false."
            yield ResolveError(sentence, change="adapters.enabled: true")
        return
    if model_config.encoder_length:
        yield ResolveError("adapters.enabled is true, but encoder-decoder models take no adapters.", change="adapters.enabled: false")
    if config.parallel.nnodes > 1:
        sentence = f"adapters.enabled is true, but parallel.nnodes is {config.parallel.nnodes}, and adapters are read on one host."
        yield ResolveError(sentence, change="adapters.enabled: false")
    names = [module.partition("=")[0] for module in adapters.modules]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        yield ResolveError(f"adapters.modules has the name {twice!r} twice; give each adapter a name of its own.")


def find_mode_conflicts(
    config: FrameConfig,
    model_config: ModelConfig,
    task: Task,
    tree: TreeShape | None,
    *,
    on_cpu: bool,
    media: bool = False,
    spans: bool = False,
) -> Iterator[ResolveError]:
    """What stands against the direction in which the checkpoint attends, and against the
    batch-invariant mode, besides plugins without the capability `batch_invariant`. media: the model
    serves them; spans: their tokens attend to later ones."""
    if _attends_both_ways(model_config):
        name, said = model_config.architecture, "config.json has is_causal: false"
        if not model_config.encoder:
            yield ResolveError(f"{said}, and {name} attends to earlier tokens alone here; serve another checkpoint.")
        elif task == "generate":
            yield ResolveError(f"{said}: its tokens attend to later ones, so it generates no text.", change="model.task: embed")
        elif model_config.sliding_window is not None:
            yield ResolveError(f"{said}, and {name} computes its sliding window for earlier tokens alone; serve another checkpoint.")
    if not config.execution.deterministic:
        return
    checks = (
        (task != "generate", f"model.task is {task}", "model.task: generate"),
        (tree is not None, "a drafter drafts trees, which another mask verifies; set its option eagle_topk to 1", None),
        (
            config.adapters.enabled and not on_cpu and (model_config.kind == "mla" or model_config.num_experts > 0),
            "adapters.enabled is true, and on GPUs fused products of latents and of experts round otherwise in steps without adapters",
            "adapters.enabled: false",
        ),
        (config.parallel.dp_attention, "parallel.dp_attention is true", "parallel.dp_attention: false"),
        (config.parallel.redundant_experts > 0, "replicas of experts take turns by row", "parallel.redundant_experts: 0"),
        (config.execution.torch_compile, "execution.torch_compile is true", "execution.torch_compile: false"),
        (media and not on_cpu, "encoders of media are tested on CPUs alone", "media.enabled: false"),
        (media and on_cpu and spans, "tokens of images attend to later ones, which another mask computes", "media.enabled: false"),
    )
    for is_conflict, sentence, change in checks:
        if is_conflict:
            yield ResolveError(f"execution.deterministic is true, but {sentence}.", change=change)


def _mode(config: FrameConfig, mode: str, why: str) -> tuple[str, str]:
    return (mode, why) if config.model.pooling is None else (config.model.pooling, "")


def _usual(model_config: ModelConfig) -> str:
    return "the default of encoders" if model_config.encoder else "the last token attends to the whole text"
