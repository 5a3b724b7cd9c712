"""What every model must satisfy: all weights loaded, and one result however a prompt is cut into
steps.

The result is that of transformers where the installed one has the architecture, else the model's
own for the whole prompt. A class names a tiny config.json in its attribute `conformance_config` for
an architecture that `frame.testing.checkpoints` does not have.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from frame.checkpoint.model_config import read_model_config
from frame.core.errors import CheckpointError, ConfigurationError
from frame.loading.loader import forget_loaded, process_weights_after_loading
from frame.testing.conformance import Check, SkipCheck, Subject, find_checks
from frame.testing.model import feature_checks, loading_checks, state_checks
from frame.testing.model.configurations import write_forms, write_settings
from frame.testing.model.session import Checkpoint, Session, build, compute_reference, find_checkpoints, load, read
from frame.testing.model.tools import Tools
from frame.testing.ranks.thread_group import ThreadGroup, run_ranks

OF_ENCODERS = (
    "weights_are_complete", "missing_tensors_are_named", "unknown_tensor_is_an_error", "agrees_with_transformers",
    "forms_of_the_configuration", "rows_of_a_batch", "weights_in_any_order", "weights_in_parts", "names_are_those_of_the_call",
    "processed_twice", "process_is_left_as_it_is",
)  # fmt: skip
MODULES = (__name__, loading_checks.__name__, state_checks.__name__, feature_checks.__name__)
LAYER = re.compile(r"[./]\d+[./]")  # in the name of a parameter
UNKNOWN = "model.layers.0.conformance_unknown.weight"


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of models, for each tiny checkpoint."""
    capabilities = subject.record.capabilities
    checkpoints = list(find_checkpoints(subject))
    if not checkpoints:
        yield Check("has_a_tiny_checkpoint", partial(_no_checkpoint, subject))
    for checkpoint in checkpoints:
        name = checkpoint.model_config.architecture
        tools = partial(Tools, subject, checkpoint)
        checks = {label: check for module in MODULES for label, check in find_checks(module)}
        if getattr(capabilities, "encoder", False):
            checks = {label: check for label, check in checks.items() if label in OF_ENCODERS}
        else:
            del checks["rows_of_a_batch"]
        for label, check in checks.items():
            yield Check(f"{label}-{name}", lambda check=check, tools=tools: check(tools()))  # type: ignore[misc]


def _no_checkpoint(subject: Subject) -> None:
    names = ", ".join(getattr(subject.record.capabilities, "architectures", None) or ("any architecture",))
    raise SkipCheck(
        f"no tiny checkpoint of {names} is known; "
        f"give {subject.target.__name__} a class attribute `conformance_config` with the content of a small config.json"
    )


# weights ------------------------------------------------------------------------------------------


@torch.no_grad()
def check_weights_are_complete(tools: Tools) -> None:
    """Every parameter has a value after loading, and `load_weights` names no other."""
    model = build(tools.subject, tools.checkpoint)
    loaded = model.load_weights(iter(read(model, tools.checkpoint)))
    known = dict(model.named_parameters(remove_duplicate=False))  # modules may share a layer
    wrong = sorted(set(loaded) - set(known))
    assert not wrong, f"`load_weights` returns {', '.join(wrong[:4])}, which are no parameters of the model"
    unnamed = sorted(set(known) - set(loaded))
    assert not unnamed, f"`load_weights` does not return {', '.join(unnamed[:4])}: the tensors are missing or were not used"
    process_weights_after_loading(model)
    unset = [name for name, value in model.named_parameters() if value.is_floating_point() and bool(value.isnan().any())]
    assert not unset, f"{', '.join(unset[:4])} hold values that `load_weights` did not set"


@torch.no_grad()
def check_missing_tensors_are_named(tools: Tools) -> None:
    """Without one of its tensors, `load_weights` returns fewer parameters or raises
    CheckpointError."""
    weights = read(build(tools.subject, tools.checkpoint), tools.checkpoint)
    for name in _one_of_each(weights):
        model = build(tools.subject, tools.checkpoint)
        if _ignored(model, name):
            continue
        try:
            loaded = model.load_weights(iter([each for each in weights if each[0] != name]))
        except CheckpointError as error:
            assert name in str(error), f"the error for a checkpoint without {name} does not name it: {error}"
            continue
        missing = set(dict(model.named_parameters())) - set(loaded)
        assert missing, f"without {name} in the checkpoint, `load_weights` still returns all parameters"


def _one_of_each(weights: list[tuple[str, Any]]) -> list[str]:
    """The names of one layer and one expert, and those outside of layers."""
    first: dict[str, str] = {}
    for name, _ in weights:
        first.setdefault(re.sub(r"\.\d+\.", ".N.", name), name)
    return list(first.values())


def _ignored(model: Any, name: str) -> bool:
    return any(re.match(pattern, name) for pattern in getattr(model, "ignored_weights", ()))


@torch.no_grad()
def check_unknown_tensor_is_an_error(tools: Tools) -> None:
    model = build(tools.subject, tools.checkpoint)
    if _ignored(model, UNKNOWN):
        raise SkipCheck("`ignored_weights` matches any name")
    weights = [*read(model, tools.checkpoint), (UNKNOWN, torch.ones(3))]
    try:
        model.load_weights(iter(weights))
    except Exception as error:  # noqa: BLE001 - of any class: its sentence counts
        assert "conformance_unknown" in str(error), f"the error for the unknown tensor {UNKNOWN} does not name it: {error}"
        return
    raise AssertionError(f"`load_weights` ignores the unknown tensor {UNKNOWN}; name what may be ignored in `ignored_weights`")


# steps --------------------------------------------------------------------------------------------


def check_agrees_with_transformers(tools: Tools) -> None:
    if tools.checkpoint.folder is None:
        raise SkipCheck("transformers has no model of this architecture here")
    tokens = tools.prompt(45, seed=1)
    tools.compare(tools.open().step((0, tokens))[0], tools.expected(tokens), "a whole prompt, against transformers")


def check_forms_of_the_configuration(tools: Tools) -> None:
    """With fields left out or written as older versions do, a model is that of transformers, or is
    refused."""
    if tools.checkpoint.folder is None:
        raise SkipCheck("transformers has no model of this architecture here")
    tokens = tools.prompt(45, seed=1)
    with tempfile.TemporaryDirectory(prefix="frame-conformance-") as place:
        for what, folder in write_forms(tools.checkpoint, Path(place)):
            _compare_form(tools, what, folder, tokens)


def check_settings_of_the_configuration(tools: Tools) -> None:
    """With other rotary scaling, activations, biases, windows and sizes of heads, where the
    architecture has them, a model is that of transformers, or is refused."""
    if tools.checkpoint.folder is None:
        raise SkipCheck("transformers has no model of this architecture here")
    tokens = tools.prompt(45, seed=1)
    with tempfile.TemporaryDirectory(prefix="frame-conformance-") as place:
        for together, singly in write_settings(tools.checkpoint, Path(place)):
            if not together or _compare_form(tools, *together[0], tokens):
                for each in singly:
                    _compare_form(tools, *each, tokens)


def _compare_form(tools: Tools, what: str, folder: Path, tokens: list[int]) -> bool:
    """Compare with transformers, where it and the model read this configuration. -> whether the
    model refuses it"""
    if (expected := compute_reference(folder, tokens)) is None:
        return False
    try:
        other = Checkpoint(replace(read_model_config(folder), encoder=tools.checkpoint.model_config.encoder), folder)
        session = Session(tools.subject, other, load(tools.subject, other))
    except (ConfigurationError, KeyError, ValueError):
        return True
    tools.compare(session.step((0, tokens))[0], expected, f"config.json {what}: a prompt, against transformers")
    return False


def check_rows_of_a_batch(tools: Tools) -> None:
    """Whole prompts in one batch."""
    prompts = [tools.prompt(length, seed=length) for length in (21, 1, 40, 21)]
    for tokens, result in zip(prompts, tools.open().step(*enumerate(prompts)), strict=True):
        tools.compare(result, tools.expected(tokens), f"a prompt of {len(tokens)} tokens among others")


def check_chunks(tools: Tools) -> None:
    tokens, session = tools.prompt(45, seed=1), tools.open()
    results = [session.step((0, part))[0] for part in (tokens[:17], tokens[17:18], tokens[18:40], tokens[40:])]
    tools.compare(torch.cat(results), tools.expected(tokens), "a prompt in four chunks")


def check_decodes(tools: Tools) -> None:
    """Token by token, from the first on."""
    tokens, session = tools.prompt(24, seed=2), tools.open()
    results = [session.step((3, [token]))[0] for token in tokens]
    tools.compare(torch.cat(results), tools.expected(tokens), "a prompt token by token")


def mix_batches(a: list[int], b: list[int], c: list[int]) -> list[list[tuple[int, list[int]]]]:
    """Steps of decodes and chunks of three prompts of 45, 39 and 21 tokens: slot and tokens of each
    row."""
    return [
        [(0, a[:40])],
        [(0, a[40:41]), (1, b[:5])],
        [(1, b[5:22]), (0, a[41:42]), (2, c[:1])],
        [(2, c[1:2]), (1, b[22:38]), (0, a[42:43])],
        [(0, a[43:44]), (1, b[38:]), (2, c[2:3])],
        [(2, c[3:]), (0, a[44:])],
    ]


def check_mixed_batches(tools: Tools, page_size: int = 16) -> None:
    """Three requests in steps of decodes and chunks."""
    a, b, c = (tools.prompt(length, seed) for length, seed in ((45, 1), (39, 2), (21, 3)))
    session = tools.open(page_size)
    results: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for rows in mix_batches(a, b, c):
        for (slot, _), part in zip(rows, session.step(*rows), strict=True):
            results[slot].append(part)
    for slot, tokens in enumerate((a, b, c)):
        tools.compare(torch.cat(results[slot]), tools.expected(tokens), f"request {slot} of mixed batches with pages of {page_size}")


def check_pages_of_1(tools: Tools) -> None:
    check_mixed_batches(tools, page_size=1)


def check_prefix_hit(tools: Tools) -> None:
    """A request starts with the cached pages of another, in a slot that a third one had."""
    tokens, session = tools.prompt(40, seed=1), tools.open()
    session.step((2, tools.prompt(7, seed=3)))
    session.release(2)
    other = [*tokens[:32], *tools.prompt(9, seed=5)]
    session.step((0, tokens))
    session.share(0, 2, 32)
    tools.compare(session.step((2, other[32:]))[0], tools.expected(other)[32:], "a prompt after a prefix hit of 32 tokens")


def check_slots_are_reused(tools: Tools) -> None:
    """A request in the slot and on the pages of an earlier one, of equal length."""
    session = tools.open()
    session.step((1, tools.prompt(20, seed=1)))
    session.step((1, [9]))
    session.release(1)
    tokens = tools.prompt(21, seed=6)
    results = [session.step((1, tokens[:20]))[0], session.step((1, tokens[20:]))[0]]
    tools.compare(torch.cat(results), tools.expected(tokens), "a request in the slot of an earlier one")


def check_long_prompts(tools: Tools) -> None:
    length = min(2151, tools.checkpoint.model_config.max_context)
    tokens, other, session = tools.prompt(length, seed=4), tools.prompt(20, seed=5), tools.open()
    first, (last, beside) = session.step((0, tokens[: length - 1]))[0], session.step((0, tokens[length - 1 :]), (1, other))
    tools.compare(torch.cat([first, last])[-20:], tools.expected(tokens)[-20:], f"the end of a prompt of {length} tokens")
    tools.compare(beside, tools.expected(other), f"a prompt of {len(other)} tokens beside one of {length}")


def check_two_ranks(tools: Tools) -> None:
    """Two ranks, which share the tensors of each layer, compute what one does: two prompts in
    chunks and decodes."""
    subject, checkpoint = tools.subject, tools.checkpoint
    if not getattr(subject.record.capabilities, "tensor_parallel", True):
        raise SkipCheck("the record says that the model has no tensor parallelism")
    if checkpoint.model_config.num_heads % 2:
        raise SkipCheck(f"two ranks cannot share {checkpoint.model_config.num_heads} attention heads")
    tokens, other = tools.prompt(30, seed=8), tools.prompt(21, seed=9)

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        session = Session(subject, checkpoint, load(subject, checkpoint, group=group), ranks=group.size)
        steps = [
            session.step((0, tokens[:17])),
            session.step((1, other[:20]), (0, tokens[17:29])),
            session.step((0, tokens[29:]), (1, other[20:])),
        ]
        return torch.cat([steps[0][0], steps[1][1], steps[2][0]]), torch.cat([steps[1][0], steps[2][1]])

    expected = tools.expected(tokens), tools.expected(other)
    for rank, results in enumerate(run_ranks(2, work, patience=60.0)):
        for result, one in zip(results, expected, strict=True):
            tools.compare(result, one, f"rank {rank} of two")


@torch.no_grad()
def check_weights_replaced_in_place(tools: Tools) -> None:
    """An update writes new values to the memory of the weights after the first steps: no result of
    the old ones is kept."""
    tokens, session = tools.prompt(20, seed=3), tools.open()
    session.step((0, tokens))
    model: Any = session.model
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    heads = [parameter for name, parameter in named.items() if "lm_head" in name]
    before = session.step((1, tokens))[0]
    for parameter in heads or named.values():  # others where the head's are packed, or those of the embedding
        parameter.mul_(2.0)
    after = session.step((2, tokens))[0]
    assert not torch.equal(before, after), "logits are those of the weights before an update in place"


@torch.no_grad()
def check_weights_loaded_again(tools: Tools) -> None:
    """After an update by another checkpoint, a model that has run computes what a new one does with
    that checkpoint."""
    tokens, session = tools.prompt(20, seed=3), tools.open()
    session.step((0, tokens))
    weights = read(build(tools.subject, tools.checkpoint), tools.checkpoint)
    values = [(name, value[...]) for name, value in weights]
    others = [(name, value.flip(0) * 1.125 if value.dim() and value.is_floating_point() else value) for name, value in values]
    results = []
    for model in (session.model, build(tools.subject, tools.checkpoint)):
        loaded: Any = model
        forget_loaded(loaded)
        loaded.load_weights(iter(others))
        process_weights_after_loading(loaded)
        results.append(Session(tools.subject, tools.checkpoint, loaded.eval().requires_grad_(False)).step((1, tokens))[0])
    tools.compare(results[0], results[1], "a prompt after an update by another checkpoint")


def check_results_are_kept(tools: Tools) -> None:
    """Token ids of another step at the same address, and logits that the next step does not
    change."""
    session, prompts = tools.open(), [tools.prompt(9, seed=seed) for seed in (1, 2)]
    expected = [tools.open().step((0, tokens))[0] for tokens in prompts]
    with torch.inference_mode():
        batches = [session.batch([(slot, tokens)], 0) for slot, tokens in enumerate(prompts)]
        ids, kept = batches[0].token_ids, []
        for batch, tokens in zip(batches, prompts, strict=True):
            ids.copy_(torch.tensor(tokens))
            kept.append(session.model.compute_logits(session.model.forward(replace(batch, token_ids=ids))))
    for result, one in zip(kept, expected, strict=True):
        tools.compare(result.float().cpu(), one, "a step whose token ids are at the address of those before")


def check_selected_tokens(tools: Tools) -> None:
    """Hidden states of `SelectedTokens` alone, and a cache that still gets all tokens."""
    session = tools.open()
    if not getattr(session.model, "supports_token_selection", False):
        raise SkipCheck("the model does not state `supports_token_selection`")
    tokens = tools.prompt(30, seed=1)
    expected = tools.expected(tokens)
    tools.compare(session.step((0, tokens[:25]), selected=[24, 3])[0].float().cpu(), expected[[24, 3]], "two selected tokens")
    tools.compare(session.step((0, tokens[25:]))[0], expected[25:], "the step after selected tokens")
    (none,) = session.step((1, tokens[:9]), selected=[])  # a chunk of a prompt alone
    assert none.shape == (0, expected.shape[1]), f"the logits of no selected token have the shape {tuple(none.shape)}"
    tools.compare(session.step((1, tokens[9:]))[0], expected[9:], "the step after one without selected tokens")


def check_far_positions(tools: Tools) -> None:
    """Positions near the maximum are told apart as those at the start are."""
    tokens, session = tools.prompt(9, seed=1), tools.open()
    batch = session.batch([(0, tokens)], 0)
    last = min(tools.checkpoint.model_config.max_context, 1 << 17) - len(tokens) - 6

    def compute(start: int, distance: int) -> torch.Tensor:
        positions = batch.positions + start
        positions[-1] += distance
        with torch.inference_mode():
            out = session.model.forward(replace(batch, positions=positions))
            return session.model.compute_logits(out)[-1].float().cpu()

    if torch.equal(compute(0, 0), compute(0, 5)):
        raise SkipCheck("its results do not depend on positions")
    for start in (last // 2, last):
        assert not torch.equal(compute(start, 0), compute(start, 5)), f"positions from {start} on count as one"


def check_numbers_that_are_not_finite(tools: Tools) -> None:
    """They show in the logits of their row, and in no other: the engine ends that request alone."""
    session, tokens = tools.open(), tools.prompt(12, seed=1)
    with torch.inference_mode():
        hidden = session.model.forward(session.batch([(0, tokens)], 0))
        expected = session.model.compute_logits(hidden).float().cpu()
        hidden[3] = torch.nan
        logits = session.model.compute_logits(hidden).float().cpu()
    assert not torch.isfinite(logits[3]).any(), "hidden states that are NaN have finite logits: the engine does not notice them"
    others = [row for row in range(len(tokens)) if row != 3]
    tools.compare(logits[others], expected[others], "logits beside a row that is NaN")
    if not tools.checkpoint.model_config.config.get("final_logit_softcapping"):
        with torch.inference_mode():
            hidden[3] = 0.0
            hidden[3, 0] = torch.inf
            logits = session.model.compute_logits(hidden).float().cpu()
        assert not torch.isfinite(logits[3]).any(), "hidden states with an infinity have finite logits: the engine does not notice them"


@torch.no_grad()
def check_a_token_that_is_not_a_number(tools: Tools) -> None:
    """A token whose embedding is NaN has logits of NaN, and changes those of no other request."""
    session, tokens = tools.open(), tools.prompt(12, seed=1)
    model: Any = session.model
    vocab, broken = tools.checkpoint.model_config.vocab_size, 3
    outside = [each for name, each in model.named_parameters() if each.dim() == 2 and not LAYER.search(name)]
    tables = [each for each in outside if vocab <= len(each) < 2 * vocab]
    if not tables:
        raise SkipCheck("no parameter has a row for each token")
    expected = session.step((0, tokens))[0]
    for table in tables:
        table[broken] = torch.nan
    poisoned, result = session.step((1, [broken, *tokens]), (2, tokens))
    kept = [token for token in range(vocab) if token != broken]  # the head may have the same table
    assert not torch.isfinite(poisoned[0]).any(), "a token whose embedding is NaN has finite logits: the engine does not notice it"
    tools.compare(result[:, kept], expected[:, kept], "a request beside one with an embedding of NaN")


def check_logits_of_some_rows(tools: Tools) -> None:
    """`compute_logits` of some hidden states, or none, are the logits of these tokens, over the
    whole vocabulary."""
    session, tokens = tools.open(), tools.prompt(12, seed=1)
    with torch.inference_mode():
        hidden = session.model.forward(session.batch([(0, tokens)], 0))
        logits = session.model.compute_logits(hidden[[7, 2]]).float().cpu()
        none = session.model.compute_logits(hidden[:0])
    vocab = tools.checkpoint.model_config.vocab_size
    assert logits.shape[-1] == vocab, f"`compute_logits` returns {logits.shape[-1]} logits, the vocabulary has {vocab} tokens"
    assert none.shape == (0, vocab), f"the logits of no rows have the shape {tuple(none.shape)}"
    tools.compare(logits, tools.expected(tokens)[[7, 2]], "the logits of two rows")


def check_bfloat16(tools: Tools) -> None:
    """Hidden states and logits stay bfloat16 or float32, and near those of float32."""
    tokens, session = tools.prompt(40, seed=4), tools.open(dtype=torch.bfloat16)
    result = torch.cat([session.step((0, tokens[:30]))[0], session.step((0, tokens[30:]))[0]])
    expected = tools.expected(tokens)
    distance = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(distance.median()) <= 0.05, f"in bfloat16, the median relative error is {float(distance.median()):.2e}, allowed 5e-02"
