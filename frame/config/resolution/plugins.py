"""The parts of `resolve` that choose GEMM kernels, MoE plugins, logits processors, parsers and the
sampling parameters of requests, and `Choices`, the record of all choices.

`KEYS` maps a plugin kind to the setting that names its plugin. Pure; it must not import or name a
plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from frame.config.resolved import DEFAULT_PARAMS, PluginChoice
from frame.config.schema import FrameConfig
from frame.config.selection import PlainRequirements, Rejected, ResolveError, Selection, by_rank, objections, select
from frame.config.server_sections import ServerSection
from frame.core.errors import PluginError, did_you_mean
from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmRequirements, Speed, choose_ranges
from frame.core.interfaces.moe import MoECapabilities, MoERequirements
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.plugin import PluginRecord
from frame.core.interfaces.sampling import PROCESSOR_PARAMS, ProcessorCapabilities
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.weight_format import FormatCapabilities, QuantType
from frame.interfaces.keys import KeyStoreRequirements
from frame.interfaces.kinds import KINDS
from frame.interfaces.parsing import ParserCapabilities
from frame.interfaces.sampler import DRAW_PARAMS, SamplerCapabilities

DEFAULTS = "sampling.defaults"
KEYS: Mapping[str, str] = MappingProxyType({kind.name: kind.key for kind in KINDS.values() if kind.key})

DISPATCHER, RUNNER = "moe_dispatcher", "moe_runner"
BUILT_IN = "builtin"  # in a list of plugins: all in-tree ones of its kind, except those with a rank below 0
FRAME_DISTRIBUTION = "frame-serve"


@dataclass
class Choices:
    """The choices made so far."""

    impossible: frozenset[str] = frozenset()  # changes that this machine cannot make, which are not proposed
    selected: dict[str, list[Selection]] = field(default_factory=dict)  # by kind
    reasons: dict[str, str] = field(default_factory=dict)  # by setting
    rejected: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by setting, then by plugin
    lacking_media: dict[str, str] = field(default_factory=dict)  # see `Resolved.lacking_media`

    def note(self, kind: str, key: str, selection: Selection, *, is_open: bool) -> None:
        """Record a selection. `is_open`: the user left the setting open, so its reason is recorded
        too."""
        self.selected.setdefault(kind, []).append(selection)
        if is_open:
            self.reasons[key] = f"{selection.record.name} is {selection.reason}"
        self._record_rejected(key, selection.rejected)

    def reject(self, key: str, kind: str, records: Mapping[str, Sequence[PluginRecord]], requirements: Any) -> list[Rejected]:
        """Record and return the plugins of a kind that do not meet `requirements`, with the
        reasons."""
        judged = [(record, objections(record, requirements, self.impossible)) for record in sorted(records.get(kind, ()), key=by_rank)]
        rejected = [Rejected(record, reasons) for record, reasons in judged if reasons]
        self._record_rejected(key, rejected)
        return rejected

    def _record_rejected(self, key: str, rejected: Sequence[Rejected]) -> None:
        for candidate in rejected:
            self.rejected.setdefault(key, {})[candidate.record.name] = [str(reason) for reason in candidate.reasons]


def choose_list(chosen: Choices, records: Mapping[str, Sequence[PluginRecord]], kind: str, named: Sequence[str], requirements: Any) -> None:
    """Choose the named plugins of a kind once each, in their order; `BUILT_IN` stands for in-tree
    ones. Raises ResolveError if one is unknown or unfit."""
    key, candidates = KEYS[kind], sorted(records.get(kind, ()), key=by_rank)
    selections: dict[str, Selection] = {}
    for name in named:
        if name == BUILT_IN:
            built_in = [record for record in candidates if record.distribution == FRAME_DISTRIBUTION and record.rank >= 0]
            refused = {each.record.name for each in chosen.reject(key, kind, {kind: built_in}, requirements)}
            for record in built_in:
                if record.name not in refused:
                    selections.setdefault(record.name, Selection(record, "built in"))
        elif (selection := select(key, candidates, requirements, name, kind=kind)) is not None:
            selections.setdefault(name, selection)
    chosen.selected[kind] = list(selections.values())
    chosen.reasons[key] = f"in this order: {', '.join(selections) or 'none'}"


def choose_adapter_formats(
    chosen: Choices, records: Mapping[str, Sequence[PluginRecord]], named: str | None, requirements: PlainRequirements
) -> None:
    """Choose the adapter format that the user names, or all that can be used: then each adapter's
    configuration selects its own. Raises ResolveError if the named one is unknown or unfit."""
    kind, key = "adapter", KEYS["adapter"]
    candidates = sorted(records.get(kind, ()), key=by_rank)
    if named is not None:
        if (selection := select(key, candidates, requirements, named, kind=kind)) is not None:
            chosen.note(kind, key, selection, is_open=False)
        return
    refused = {each.record.name for each in chosen.reject(key, kind, records, requirements)}
    usable = [Selection(record, "can be used") for record in candidates if record.name not in refused]
    chosen.selected[kind] = usable
    chosen.reasons[key] = f"by each adapter's configuration: {', '.join(each.record.name for each in usable) or 'none'}"


def choose_optional(
    chosen: Choices, records: Mapping[str, Sequence[PluginRecord]], kind: str, named: str | None, requirements: Any
) -> None:
    """Choose a plugin of a kind that the server can do without. Raises ResolveError if the named
    one is unknown or unfit."""
    selection = select(KEYS[kind], records.get(kind, ()), requirements, named, kind=kind)
    if selection is not None:
        chosen.note(kind, KEYS[kind], selection, is_open=named is None)
    else:
        chosen.reject(KEYS[kind], kind, records, requirements)
        chosen.reasons[KEYS[kind]] = f"none: no usable {kind} is installed"


def choose_key_store(chosen: Choices, records: Mapping[str, Sequence[PluginRecord]], server: ServerSection) -> None:
    """Choose the key store that the user names, or the one that reads the keys of the settings;
    none for a server without keys. Raises ResolveError if it is unknown or unfit."""
    kind, key = "key_store", KEYS["key_store"]
    requirements = KeyStoreRequirements(server.api_key is not None or server.api_keys is not None)
    if not requirements.has_keys and server.key_store is None:
        return
    selection = select(key, records.get(kind, ()), requirements, server.key_store, kind=kind)
    if selection is None:
        rejected = chosen.reject(key, kind, records, requirements)
        raise ResolveError("No key store has the keys of server.api_key and server.api_keys.", rejected)
    chosen.note(kind, key, selection, is_open=server.key_store is None)


def resolve_params(
    chosen: Choices,
    records: Mapping[str, Sequence[PluginRecord]],
    named: Mapping[str, int | float] | None,
    stored: Mapping[str, int | float],
) -> dict[str, Any]:
    """`refused_params` and `custom_params` of `Resolved`, from the chosen logits processors and
    sampler, and `sampling_defaults`. named: by the user. stored: in the checkpoint. Raises
    ResolveError."""
    kind = "logits_processor"
    if kind not in chosen.selected:  # nothing is sampled
        return {}
    used = [selection.record for selection in chosen.selected[kind]]
    keys = [can.custom if isinstance(can := record.capabilities, ProcessorCapabilities) else None for record in used]
    custom = None if None in keys else tuple(key for each in keys for key in each or ())
    missing = [name for name in PROCESSOR_PARAMS if not any(_implements(record, name) for record in used)]
    refused = {name: _refuse_param(name, records.get(kind, ())) for name in missing}
    for sampler in (selection.record for selection in chosen.selected.get("sampler", ())):
        if isinstance(can := sampler.capabilities, SamplerCapabilities):
            refused |= {name: _refuse_draw(name, sampler.name) for name in DRAW_PARAMS if name not in can.params}
            custom = None if custom is None else (*custom, *can.custom)
    defaults = _choose_defaults(named, stored, refused, chosen.reasons)
    return {"refused_params": refused, "custom_params": custom, "sampling_defaults": defaults}


def _refuse_draw(param: str, sampler: str) -> str:
    """The sentence for a request with a parameter that the sampler does not honour."""
    return f"{param} has no effect with the sampler {sampler} of this server; leave it out, or serve with another {KEYS['sampler']}"


def _implements(record: PluginRecord, param: str) -> bool:
    return isinstance(record.capabilities, ProcessorCapabilities) and param in record.capabilities.params


def _refuse_param(param: str, records: Sequence[PluginRecord]) -> str:
    """The sentence for a request with a parameter that no chosen logits processor implements."""
    able = [record for record in sorted(records, key=by_rank) if _implements(record, param)]
    if not able:
        return f"{param} needs a logits processor, and none that implements it is installed; leave it out"
    names = " or ".join(record.name for record in able)
    add = f"add {able[0].name} to {KEYS['logits_processor']}"
    remedy = "; ".join(map(str, able[0].problems)) or add
    return f"{param} needs the logits processor {names}, which this server does not use; leave it out, or change the server: {remedy}"


def _choose_defaults(
    named: Mapping[str, int | float] | None, stored: Mapping[str, int | float], refused: Mapping[str, str], reasons: dict[str, str]
) -> dict[str, int | float]:
    """The sampling parameters of requests that leave them out. Those of the checkpoint that this
    server refuses are left out."""
    values, source = (stored, "generation_config.json") if named is None else (named, DEFAULTS)
    for name in values:
        if name not in DEFAULT_PARAMS:
            hint = did_you_mean(name, DEFAULT_PARAMS) or f"; it takes {', '.join(DEFAULT_PARAMS)}."
            raise ResolveError(f"{source} has {name!r}{hint}")
    if named is None:
        values = {name: value for name, value in stored.items() if name not in refused}
        left_out = [name for name in stored if name in refused]
        lacking = f", without {' and '.join(left_out)}, which this server does not take" if left_out else ""
        reasons[DEFAULTS] = f"from generation_config.json{lacking}" if stored else "generation_config.json sets none"
    remedy = f"{DEFAULTS}: {{}}" if named is None else ""
    for name in values:
        if name in refused:
            raise ResolveError(f"{source}: {refused[name]}.")
    try:
        params = msgspec.convert(dict(values), SamplingParams)
    except msgspec.ValidationError as error:
        raise ResolveError(f"{source}: {str(error).replace('`', '')}.", change=remedy) from None
    for problem in params.problems():
        raise ResolveError(f"{source}: {problem.sentence}.", change=remedy)
    return dict(values)


def choose_gemm_kernels(
    chosen: Choices, records: Mapping[str, Sequence[PluginRecord]], named: str | None, requirements: GemmRequirements, stored: PluginRecord
) -> None:
    """Choose all GEMM kernels that fit the device: the layers select among them by the weight and
    the number of rows. Raises ResolveError if the named one is unknown, unfit, or not made for what
    the weight format `stored` yields."""
    kind, key = "gemm_kernel", KEYS["gemm_kernel"]
    candidates = sorted(records.get(kind, ()), key=by_rank)
    capabilities = stored.capabilities
    quant_types = capabilities.quant_types if isinstance(capabilities, FormatCapabilities) else ()
    chosen.reject(key, kind, records, requirements)
    usable = [record for record in candidates if not objections(record, requirements)]
    rated = [RatedRecord(record, record.name == named) for record in usable]
    if named is not None:
        select(key, candidates, requirements, named, kind=kind)
        (named_kernel,) = (each for each in rated if each.required)
        if not any(speed.quant_type in quant_types for speed in named_kernel.speeds):
            takes = dict.fromkeys(speed.quant_type for speed in named_kernel.speeds)
            raise ResolveError(
                f"{key}: {named} multiplies {' and '.join(takes) or 'no'} weights, but model.quantization {stored.name} "
                f"yields {' and '.join(quant_types)} ones; set another model.quantization or leave {key} open."
            )
    chosen.selected[kind] = [Selection(record, "fits the device") for record in usable]
    chosen.reasons[key] = "; ".join(f"{each}: {_describe_ranges(rated, each)}" for each in quant_types)


@dataclass(frozen=True, slots=True)
class RatedRecord:
    """A kernel's record as `choose_ranges` compares it."""

    record: PluginRecord
    required: bool

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def speeds(self) -> tuple[Speed, ...]:
        return self.record.capabilities.speeds if isinstance(self.record.capabilities, GemmCapabilities) else ()


def _describe_ranges(rated: Sequence[RatedRecord], quant_type: QuantType) -> str:
    """The kernels of a quantized type with their measured speeds, which are relative to unquantized
    weights."""
    ranges = []
    for rows, each in choose_ranges(rated, quant_type):
        ratios = [speed.ratio for speed in each.speeds if speed.quant_type == quant_type and (speed.rows == rows or not speed.rows)]
        where = f" to {rows} rows" if rows else ""
        ranges.append(f"{each.name}{where} (x {max(ratios, default=0.0):g})")
    return ", ".join(ranges) or "no kernel"


def choose_parser(chosen: Choices, records: Mapping[str, Sequence[PluginRecord]], kind: str, template: str) -> None:
    """Choose the parser whose markers the chat template contains; if there is none, the best-ranked
    general parser; if there are several, none."""
    key = KEYS[kind]
    usable: list[PluginRecord] = []
    general: list[PluginRecord] = []
    for record in sorted(records.get(kind, ()), key=by_rank):
        can = record.capabilities
        if isinstance(can, ParserCapabilities) and not record.problems and template:
            usable += [record] if can.suits(template) else []
            general += [record] if can.is_general else []
    if len(usable) == 1:
        chosen.note(kind, key, Selection(usable[0], "the only one whose markers are in the chat template"), is_open=True)
    elif usable:
        chosen.reasons[key] = f"none: the chat template has the markers of {' and '.join(record.name for record in usable)}; name one"
    elif general:
        chosen.note(kind, key, Selection(general[0], "general, and the chat template has no known markers"), is_open=True)
    else:
        chosen.reasons[key] = "none: the chat template has no known markers"


def plugin_choice(record: PluginRecord, config: FrameConfig) -> PluginChoice:
    """The choice as sent to other processes, with the plugin's own settings validated and complete.
    Raises PluginError."""
    options = plugin_options(record, config.plugins.options.get(f"{record.kind}/{record.name}", {}))
    return PluginChoice(
        kind=record.kind,
        name=record.name,
        target=record.target,
        distribution=record.distribution,
        version=record.version,
        options=options.model_dump(mode="json") if options is not None else {},
    )


def plugin_options(record: PluginRecord, values: Mapping[str, Any]) -> BaseModel | None:
    """Validate `values` against the plugin's options model; None if it has none. Raises PluginError
    that names the key."""
    where = f"plugins.options.{record.kind}/{record.name}"
    if record.options is None:
        if values:
            raise PluginError(f"{where} has keys ({', '.join(values)}), but {record.name} takes no options; remove them.")
        return None
    known = set(record.options.model_fields) | {f.alias for f in record.options.model_fields.values() if f.alias}
    if record.options.model_config.get("extra") != "allow":
        for key in values:
            if key not in known:
                allowed = ", ".join(sorted(known)) or "none"
                raise PluginError(f"{where}.{key} is unknown{did_you_mean(key, known) or '.'} Its options: {allowed}.")
    try:
        return record.options.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(step) for step in first["loc"])
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise PluginError(f"{where}{'.' + key if key else ''} is {first['input']!r}: {message}.") from None


def check_unused_options(config: FrameConfig, records: Mapping[str, Sequence[PluginRecord]], chosen: Choices) -> None:
    """Raise PluginError for settings of a plugin that is not installed, and for wrong ones of a
    plugin that is not selected."""
    known = {f"{kind}/{record.name}": record for kind, group in records.items() for record in group}
    selected = [selection.record for group in chosen.selected.values() for selection in group]
    for name, values in config.plugins.options.items():
        if name in known:
            if known[name].options is not None and known[name] not in selected:  # commands may have options on the class
                plugin_options(known[name], values)
        else:
            raise PluginError(f"plugins.options holds {name!r}, but no such plugin is installed{did_you_mean(name, known) or '.'}")


def pair_experts(
    chosen: Choices,
    records: Mapping[str, Sequence[PluginRecord]],
    named: Mapping[str, str | None],
    requirements: MoERequirements,
    plan: ParallelPlan,
) -> None:
    """Replace the choices of a dispatcher and a runner by the best-ranked pair that shares a
    layout, where the two that were chosen share none. Raises ResolveError where no pair with the
    `named` ones does."""
    first, second = (chosen.selected[kind][-1].record for kind in (DISPATCHER, RUNNER))
    conflict = _find_conflict(first, second)
    if not conflict:
        return
    fits = {
        kind: [record for record in sorted(records.get(kind, ()), key=by_rank) if not objections(record, needed, chosen.impossible)]
        for kind, needed in ((DISPATCHER, replace(requirements, plan=plan, biased=False)), (RUNNER, requirements))
    }
    open_to = {kind: [r for r in fitting if named[kind] in (None, r.name)] for kind, fitting in fits.items()}
    pair = next(_pairs(open_to[DISPATCHER], open_to[RUNNER]), None)
    if pair is None:
        raise _refusal(first, second, conflict, fits)
    for kind, record, other in zip((DISPATCHER, RUNNER), pair, reversed(pair), strict=True):
        if record.name != chosen.selected[kind][-1].record.name:
            why = f"the best-ranked that fits {KEYS[other.kind]} {other.name}"
            chosen.selected[kind].pop()
            chosen.note(kind, KEYS[kind], Selection(record, why), is_open=True)


def _pairs(dispatchers: Sequence[PluginRecord], runners: Sequence[PluginRecord]) -> Iterator[tuple[PluginRecord, PluginRecord]]:
    for runner in runners:  # the runner's rank counts first: experts take most of the time
        for dispatcher in dispatchers:
            if not _find_conflict(dispatcher, runner):
                yield dispatcher, runner


def _find_conflict(dispatcher: PluginRecord, runner: PluginRecord) -> str:
    """Why the runner cannot take what the dispatcher produces; empty if it can."""
    produced, taken = dispatcher.capabilities, runner.capabilities
    if not (isinstance(produced, MoECapabilities) and isinstance(taken, MoECapabilities)) or set(produced.layouts) & set(taken.layouts):
        return ""
    return f"{dispatcher.name} produces the layout {' or '.join(produced.layouts)}, {runner.name} takes {' or '.join(taken.layouts)}"


def _refusal(first: PluginRecord, second: PluginRecord, conflict: str, fits: Mapping[str, Sequence[PluginRecord]]) -> ResolveError:
    """The nearest change replaces one of the two; the runner stays where that is possible."""
    for kind, pairs in ((DISPATCHER, _pairs(fits[DISPATCHER], [second])), (RUNNER, _pairs([first], fits[RUNNER]))):
        if (pair := next(pairs, None)) is not None:
            change = f"{KEYS[kind]}: {pair[0 if kind == DISPATCHER else 1].name}"
            break
    else:
        change = None
    remedy = "" if change else "; install a dispatcher or a runner for the other's layout"
    both = f"{KEYS[DISPATCHER]}: {first.name} and {KEYS[RUNNER]}: {second.name}"
    return ResolveError(f"{both} do not fit: {conflict}{remedy}.", change=change)
