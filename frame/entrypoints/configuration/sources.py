"""Builds a `FrameConfig` from its sources (flag > environment > file > default) and records the
source of each value.

Values are validated by the schema. Unknown keys and wrong types raise ConfigError with their place.
Used by commands and `Engine`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from pydantic import ValidationError

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigError, did_you_mean, nearest_word
from frame.entrypoints.configuration.flat_settings import ALIASES, OPTIONS_KEY, Setting, by_key, by_keyword
from frame.entrypoints.configuration.tier_flags import TIER_FLAGS, TIERS, read_tier_flags
from frame.entrypoints.configuration.yaml_file import Located, parse_yaml, plain, read_yaml

ENV_PREFIX = "FRAME_"
ENV_CONFIG = "FRAME_CONFIG"
ENV_OTHERS = frozenset(  # read elsewhere
    {ENV_CONFIG, "FRAME_API_KEY", "FRAME_ADMIN_KEY", "FRAME_DIST_KEY", "FRAME_FLEET_KEY", "FRAME_NO_PDL"}
)
ENV_CLOSENESS = 0.85  # of another variable to a setting, from 0 to 1, from which it is taken for a spelling mistake
_OF_KUBERNETES = ("_addr", "_proto", "_service_host", "_service_port")  # of services whose names begin with frame
SECRETS = ("server.api_key", "server.admin_key")
SERVER_KEYS = frozenset(  # beside the sections server and batches
    {
        "adapters.folders",
        "adapters.uploads",
        "log.access",
        "log.request_dump",
        "log.request_dump_content",
        "log.request_dump_max_age",
        "log.request_dump_max_bytes",
        "log.request_dump_share",
        "log.stat_loggers",
        "text.detokenizer_workers",
        "text.moderation_policy",
        "text.reasoning_parser",
    }
    | {"text.tokenizer_workers", "text.tool_call_parser", "text.trust_request_chat_template"}
)
EVERY_KEY = "`frame config show` lists every key"

Path = tuple[str, ...]  # ("cache", "page_size"), ("plugins", "options", "attention_backend/x", "splits")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and the source of each value that is not a default: `cache.page_size` ->
    "frame.yaml:3" or "flag --page-size"."""

    config: FrameConfig
    sources: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None  # the YAML file that was read
    reread: Callable[[], LoadedConfig] | None = None  # loads the same sources again; raises ConfigError

    def source(self, key: str) -> str:
        """The source of the value of `key`; "default" if it is not set."""
        return self.sources.get(key, "default")


def load_config(
    file: str | None = None, flags: Mapping[str, Any] | None = None, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """The configuration of a command. Raises ConfigError that names file and line, variable or
    flag.

    file: path of a YAML file; None: FRAME_CONFIG. flags: flag name without leading dashes -> value
    (None: not given; text is parsed by the setting's type). sets: `key=value` texts, which override
    flags.
    """
    environ = os.environ if environ is None else environ
    path = file or environ.get(ENV_CONFIG)
    layers = _Layers(path, environ)
    layers.add_all(_from_flags(flags or {}))
    layers.add_all(_from_sets(sets))
    return replace(layers.build(), file=path or None, reread=partial(load_config, file, flags, sets, environ))


def from_keywords(environ: Mapping[str, str] | None = None, /, **keywords: Any) -> LoadedConfig:
    """The configuration of `Engine(...)`.

    Keywords are flags with underscores (`tp=2`), `section_field` (`cache_page_size=16`),
    `"section.field"`, sections as dicts (`cache={"page_size": 16}`) and `config="file.yaml"`.
    Environment and file apply as for commands.
    """
    environ = os.environ if environ is None else environ
    layers = _Layers(keywords.pop("config", None) or environ.get(ENV_CONFIG), environ)
    seen: dict[Path, str] = {}
    for key, value, source in _from_python(keywords):
        if key in seen:
            raise ConfigError(f"{'.'.join(key)} is given twice: {seen[key]} and {source}; keep one.")
        seen[key] = source
        layers.add(key, value, source)
    return layers.build()


def refuse_server_settings(loaded: LoadedConfig) -> None:
    """Raise ConfigError for a flag or keyword of an engine without a server that only servers
    read. A file or the environment may serve both."""
    for key, source in loaded.sources.items():
        if source.startswith(("flag ", "keyword ")) and (key.startswith(("server.", "batches.")) or key in SERVER_KEYS):
            raise ConfigError(f"{source}: {key} applies to servers, and this engine has none; leave it out, or use frame serve")


class _Layers:
    """Values by path: of a file, then of the environment, then those added; the last one counts."""

    def __init__(self, file: Any, environ: Mapping[str, str]) -> None:
        self.values: dict[Path, Any] = {}
        self.sources: dict[str, str] = {}
        if file:
            self.add_all(_from_mapping(read_yaml(str(file))))
        self.add_all(_from_environment(environ))

    def add_all(self, items: Iterator[tuple[Path, Any, str]]) -> None:
        for key, value, source in items:
            self.add(key, value, source)

    def add(self, key: Path, value: Any, source: str) -> None:
        self.values[key] = value
        self.sources[".".join(key)] = source

    def build(self) -> LoadedConfig:
        tree: dict[str, Any] = {}
        for (*parents, last), value in self.values.items():
            here = tree
            for name in parents:
                here = here.setdefault(name, {})
            here.setdefault(last, {}) if value == {} else here.__setitem__(last, value)
        try:
            config = FrameConfig.model_validate(tree)
        except ValidationError as error:
            raise ConfigError("\n".join(self._sentence(item) for item in error.errors())) from None
        return LoadedConfig(config, self.sources)

    def _sentence(self, error: Any) -> str:
        loc = [str(item) for item in error["loc"]]
        key = ".".join(loc[:2])
        source = next((s for k, s in self.sources.items() if k == key or k.startswith(key + ".")), "default")
        _, _, asked = error["msg"].partition(" should ")
        said = asked.partition(", unable to")[0].replace("a valid tuple", "a list") or "be " + error["msg"].removeprefix("Value error, ")
        return f"{source}: {key} is {error['input']!r}; it should {said}."


def _from_mapping(root: Located) -> Iterator[tuple[Path, Any, str]]:
    """The settings of a file, with every key checked against the schema."""
    known = by_key()
    sections = {key.partition(".")[0] for key in known}
    for section, inside in root.value.items():
        if section not in sections:
            if section in known:
                outer, _, inner = section.partition(".")
                raise ConfigError(f"{inside.place}: {section} is a dotted key; write {outer}: {{{inner}: …}}.")
            hint = did_you_mean(section, [*sections, *(s.key for s in known.values())])
            owner = next((s.key for s in known.values() if section in (s.path[1], s.keywords[0])), None)
            remedy = f"; write it in its section: {owner}" if owner else hint or f"; sections: {', '.join(sorted(sections))}"
            raise ConfigError(f"{inside.place}: unknown section {section!r}{remedy.rstrip('?')}{'?' if remedy.endswith('?') else '.'}")
        if inside.value is None:
            continue
        if not isinstance(inside.value, dict):
            remedy = f"; write {section}: {{path: {inside.value}}}" if section == "model" and isinstance(inside.value, str) else ""
            raise ConfigError(f"{inside.place}: {section} must be a mapping of settings, not {inside.value!r}{remedy}.")
        for name, located in inside.value.items():
            setting = _known(f"{section}.{name}", known, located.place)
            if setting.path == OPTIONS_KEY:
                yield from _options(located)
            else:
                yield setting.path, _typed(setting, plain(located), located.place), located.place


def _options(located: Located) -> Iterator[tuple[Path, Any, str]]:
    """Options of plugins, one value per key, so that another source can replace one key."""
    if not isinstance(located.value, dict):
        raise ConfigError(f"{located.place}: plugins.options must map `kind/name` to that plugin's settings, not be {located.value!r}.")
    for plugin, inside in located.value.items():
        if not isinstance(inside.value, dict):
            raise ConfigError(f"{inside.place}: plugins.options.{plugin} must be a mapping of settings, not {inside.value!r}.")
        yield (*OPTIONS_KEY, plugin), {}, inside.place
        for key, value in inside.value.items():
            yield (*OPTIONS_KEY, plugin, key), plain(value), value.place


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Path, Any, str]]:
    """The settings in variables `FRAME_SECTION__FIELD`. Others that resemble the name of a setting,
    a flag or a section are refused."""
    known = by_key()
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or variable in ENV_OTHERS:
            continue
        if "__" not in name:
            _refuse_resemblance(variable, environ[variable])
            continue
        source = f"environment {variable}"
        section, _, rest = name.lower().partition("__")
        key = f"{section}.{rest}"
        if key not in known:
            near = nearest_word(key, known)
            spelt = f"; did you mean {_variable(near)}?" if near else f"; write {ENV_PREFIX}SECTION__FIELD."
            raise ConfigError(f"The environment variable {variable} names no setting{spelt}")
        yield from _from_text(known[key], environ[variable], source)


def _refuse_resemblance(variable: str, value: str) -> None:
    """Raise ConfigError for a variable without `__` whose name is, or almost is, that of a setting.
    Kubernetes sets `FRAME_PORT` and others, with addresses, beside a service called frame."""
    name = variable.removeprefix(ENV_PREFIX).lower()
    if value.startswith(("tcp://", "udp://", "sctp://")) or name.startswith("service_") or name.endswith(_OF_KUBERNETES):
        return
    short = {word: setting.key for word, setting in by_keyword().items()}
    sections = {key.partition(".")[0] for key in by_key()}
    names = {"config": "config", **{section: f"{section}.field" for section in sections}, **short}
    near = name if name in names else next(iter(get_close_matches(name, names, n=1, cutoff=ENV_CLOSENESS)), None)
    if near is not None:
        raise ConfigError(f"The environment variable {variable} names no setting; did you mean {_variable(names[near])}?")


def _variable(key: str) -> str:
    return f"{ENV_PREFIX}{key.replace('.', '__').upper()}"


def _from_flags(flags: Mapping[str, Any]) -> Iterator[tuple[Path, Any, str]]:
    known = {setting.flag: setting for setting in by_key().values()}
    explicit = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    for name, value in explicit.items():
        source = f"flag --{name}"
        if name in ALIASES:
            key, meaning, _ = ALIASES[name]
            setting = by_key()[key]
            if value is True and explicit.get(setting.flag, meaning) != meaning:
                raise ConfigError(f"--{name} and --{setting.flag} {explicit[setting.flag]} contradict each other; keep one.")
            if value is True:
                yield setting.path, meaning, source
        elif name in TIER_FLAGS:
            continue
        elif name in known:
            setting = known[name]
            source = f"flag --no-{name}" if value is False else source
            yield from (_from_text(setting, value, source) if isinstance(value, str) else ((setting.path, value, source),))
        else:
            raise ConfigError(f"Unknown flag --{name}{did_you_mean(name, [*known, *ALIASES, *TIER_FLAGS]) or '.'}")
    yield from read_tier_flags(explicit, "flag --")


def _from_sets(sets: Sequence[str]) -> Iterator[tuple[Path, Any, str]]:
    """The settings in `--set key=value`, options of plugins among them."""
    known = by_key()
    options = ".".join(OPTIONS_KEY) + "."
    for text in sets:
        key, sign, value = text.partition("=")
        source = f"flag --set {key}"
        if not sign:
            raise ConfigError(f"--set {text} has no value; write --set key=value.")
        if key.startswith(options):
            plugin, _, name = key.removeprefix(options).rpartition(".")
            if "/" not in plugin or not name:
                raise ConfigError(f"--set {key}: write plugins.options.KIND/NAME.KEY=value.")
            yield (*OPTIONS_KEY, plugin, name), plain(parse_yaml(value, source)), source
        else:
            yield from _from_text(_known(key, known, source), value, source)


def _from_python(keywords: Mapping[str, Any]) -> Iterator[tuple[Path, Any, str]]:
    known, short = by_key(), by_keyword()
    sections = {key.partition(".")[0] for key in known}
    tier_flags: dict[str, Any] = {}
    for name, value in keywords.items():
        source = f"keyword {name}"
        if name in sections and isinstance(value, Mapping):
            yield from _from_mapping(Located({name: _located(value, source)}, source))
        elif name in known or name in short:
            setting = known.get(name) or short[name]
            if setting.path == OPTIONS_KEY:
                yield from _options(_located(value, source))
            else:
                yield setting.path, _typed(setting, value, source), source
        elif (flag := name.replace("_", "-")) in TIER_FLAGS:
            tier_flags[flag] = value
        elif flag in ALIASES:
            key, meaning, _ = ALIASES[flag]
            if value:
                yield known[key].path, meaning, source
        else:
            from frame.entrypoints.configuration.equivalents import suggest_keyword

            other = suggest_keyword(name)
            hint = f"; did you mean {other!r}?" if other else did_you_mean(name, [*short, *(sections - {name}), "disable_radix_cache"])
            raise ConfigError(f"Unknown keyword {name!r}{hint or f'; {EVERY_KEY}.'}")
    named = next((keywords[name] for name in (TIERS.replace("-", "_"), "cache.tiers") if name in keywords), None)
    yield from read_tier_flags({**tier_flags, TIERS: named}, "keyword ")


def _located(value: Any, place: str) -> Located:
    if isinstance(value, Mapping):
        return Located({str(key): _located(inner, place) for key, inner in value.items()}, place)
    return Located(value, place)


def _from_text(setting: Setting, text: str, source: str) -> Iterator[tuple[Path, Any, str]]:
    """A value given as text, parsed by the setting's type."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # bytes that the locale does not decode
        raise ConfigError(f"{source}: the value is no text in this locale; use UTF-8, as with LC_ALL=C.UTF-8.")
    if setting.path == OPTIONS_KEY:
        yield from _options(_located(plain(parse_yaml(text, source)), source))
    elif setting.shape == "list":
        is_flow, is_objects = text.strip().startswith("["), text.strip().startswith("{")
        flow = f"[{text}]" if is_objects else text
        items = plain(parse_yaml(flow, source)) if is_flow or is_objects else [item.strip() for item in text.split(",") if item.strip()]
        yield setting.path, items, source
    elif text == "" and setting.is_optional and setting.key not in (*SECRETS, "server.api_keys"):  # an empty key is an error
        yield setting.path, None, source
    else:
        yield setting.path, text, source


def _known(key: str, known: Mapping[str, Setting], place: str) -> Setting:
    if key not in known:
        section, _, name = key.partition(".")
        inside = [other.partition(".")[2] for other in known if other.startswith(section + ".")]
        elsewhere = next((other for other in known if other.partition(".")[2] == name), None)
        outer = key.rpartition(".")[0]
        hint = (
            (f"; did you mean {outer}?" if outer in known else "")
            or did_you_mean(name, inside)
            or (f"; did you mean {elsewhere}?" if elsewhere else "")
            or did_you_mean(key, known)
        )
        raise ConfigError(f"{place}: unknown key {key!r}{hint or f'; {EVERY_KEY}.'}")
    return known[key]


def _typed(setting: Setting, value: Any, place: str) -> Any:
    """Raise ConfigError for a bool where the type has none, and for a text where it has numbers or
    bools alone; pydantic would read `true` as 1 and `"64"` as 64."""
    is_text = isinstance(value, str) and value not in setting.choices and not (setting.is_open and value == "auto")
    if is_text and setting.accepts and set(setting.accepts) <= {int, float, bool}:
        words = "true or false" if bool in setting.accepts else "a number"
        words = ", ".join((words, *setting.choices)) if setting.choices else words
        raise ConfigError(f"{place}: {setting.key} is the text {value!r}; it should be {words}, without quotes. {setting.description}")
    if isinstance(value, bool) and bool not in setting.accepts:
        words = f"; it is one of {', '.join(setting.choices)}" if setting.choices else ""
        raise ConfigError(f"{place}: {setting.key} is {str(value).lower()}; it must not be true or false{words}. {setting.description}")
    return value
