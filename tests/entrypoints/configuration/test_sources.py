"""Where a configuration comes from: precedence, provenance, and errors that name the place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigError, ConfigurationError
from frame.entrypoints.configuration.flat_settings import ALIASES, by_key, by_keyword, settings
from frame.entrypoints.configuration.sources import ENV_OTHERS, LoadedConfig, from_keywords, load_config
from frame.entrypoints.keys import check_exposure
from frame.interfaces.kinds import KINDS

SEED_FLAGS = {
    "model",
    "tp",
    "attention-backend",
    "trust-remote-code",
    "enable-torch-compile",
    "torch-compile-max-bs",
    "quantization",
    "kv-cache-dtype",
    "mem-fraction-static",
    "chunked-prefill-size",
    "max-running-requests",
    "schedule-policy",
    "disable-radix-cache",
    "page-size",
    "load-format",
}


def load(text: str, folder: Path, **more: Any) -> LoadedConfig:
    file = folder / "x.yaml"
    file.write_text(text)
    return load_config(str(file), environ=more.pop("environ", {}), **more)


def error(text: str, folder: Path, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, folder, **more)
    return str(caught.value).replace(f"{folder}/", "")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = "cache:\n  page_size: 1\n  kv_dtype: float16\n  eviction: mru\n"
    environ = {"FRAME_CACHE__PAGE_SIZE": "2", "FRAME_CACHE__KV_DTYPE": "bfloat16"}
    loaded = load(file, tmp_path, environ=environ, flags={"page-size": "4"})
    cache = loaded.config.cache
    assert (cache.page_size, cache.kv_dtype, cache.eviction, cache.prefix) == (4, "bfloat16", "mru", None)
    assert loaded.source("cache.page_size") == "flag --page-size"
    assert loaded.source("cache.kv_dtype") == "environment FRAME_CACHE__KV_DTYPE"
    assert loaded.source("cache.eviction") == f"{tmp_path}/x.yaml:4"
    assert loaded.source("cache.prefix") == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("parallel: {tp: 2}")
    environ = {"FRAME_CONFIG": str(tmp_path / "e.yaml"), "FRAME_FAKE_STEP": "no setting"}
    assert load_config(environ=environ).config.parallel.tp == 2
    assert load("parallel: {tp: 4}", tmp_path, environ=environ).config.parallel.tp == 4


def test_false_is_not_absent_and_null_is(tmp_path: Path) -> None:
    loaded = load("scheduler: {overlap: false}\nexecution: {check_integrity: off, torch_compile: false}\nmoe:\n", tmp_path)
    assert loaded.config.scheduler.overlap is False
    assert loaded.config.execution.check_integrity == "off"
    assert "execution.torch_compile" in loaded.sources
    assert load("scheduler: {overlap: null}", tmp_path).config.scheduler.overlap is None
    assert load("scheduler: {overlap: auto}", tmp_path).config.scheduler.overlap is None
    assert load("", tmp_path).config == FrameConfig()


def test_types_may_be_spelt_short(tmp_path: Path) -> None:
    loaded = load("model: {dtype: bf16}\ncache: {kv_dtype: fp8}", tmp_path)
    assert (loaded.config.model.dtype, loaded.config.cache.kv_dtype) == ("bfloat16", "fp8_e4m3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cache:\n  page_sise: 1", "x.yaml:2: unknown key 'cache.page_sise'; did you mean 'page_size'?"),
        ("\ncach:\n  page_size: 1", "x.yaml:2: unknown section 'cach'; did you mean 'cache'?"),
        ("page_size: 1", "x.yaml:1: unknown section 'page_size'; write it in its section: cache.page_size."),
        ("cache:\n  policy: lru", "x.yaml:2: unknown key 'cache.policy'; did you mean 'write_policy'?"),
        ("cache:\n  page_size: 1\n  page_size: 2", "x.yaml:3: the key 'page_size' is given twice (first at x.yaml:2); keep one."),
        ("cache:\n  page_size: 1\ncache: {}", "x.yaml:3: the key 'cache' is given twice"),
        ("cache:\n  page_size: many", "x.yaml:2: cache.page_size is the text 'many'; it should be a number, without quotes."),
        ('cache:\n  page_size: "64"', "x.yaml:2: cache.page_size is the text '64'; it should be a number, without quotes."),
        ('cache:\n  mem_fraction: "0.5"', "cache.mem_fraction is the text '0.5'; it should be a number, without quotes."),
        ("scheduler:\n  overlap: 'true'", "scheduler.overlap is the text 'true'; it should be true or false, without quotes."),
        ("server:\n  access_log: 1", "x.yaml:2: unknown key 'server.access_log'; `frame config show` lists every key."),
        ("cache:\n  page_size: true", "x.yaml:2: cache.page_size is true; it must not be true or false"),
        ("cache:\n  page_size: 0", "x.yaml:2: cache.page_size is 0; it should be greater than or equal to 1."),
        ("log:\n  format: tree", "x.yaml:2: log.format is 'tree'; it should be 'text' or 'json'."),
        ('model:\n  served_name: "a\\nb"', "x.yaml:2: model.served_name is 'a\\nb'; it should be printable text."),
        ('model:\n  served_aliases: [a, "b\\x00"]', "model.served_aliases is ['a', 'b\\x00']; it should be printable text."),
        ("model:\n  served_name: 12", "x.yaml:2: model.served_name is 12; it should be a valid string."),
        ("log:\n  format: false", "it must not be true or false; it is one of text, json."),
        ("cache:\n  <<: {page_size: 1}", "x.yaml:2: merge keys (<<) are not supported; write the settings out."),
        ("cache.page_size: 1", "x.yaml:1: cache.page_size is a dotted key; write cache: {page_size: …}."),
        ("model: frame-tiny", "x.yaml:1: model must be a mapping of settings, not 'frame-tiny'; write model: {path: frame-tiny}."),
        ("plugins:\n  allow: x", "x.yaml:2: plugins.allow is 'x'; it should be a list."),
        ("cache: 3", "x.yaml:1: cache must be a mapping of settings, not 3."),
        ("- 1", "x.yaml:1: a configuration is a mapping of sections"),
        ("cache: [1", "x.yaml:1: not valid YAML: "),
        ("? [a]\n: 1", "x.yaml:1: a key must be a word."),
        ("model: !!python/object/apply:os.system [ls]", "x.yaml:1: model must be a mapping of settings"),
        ("log:\n  level: !!python/name:os.system x", "x.yaml:2: not valid YAML: could not determine a constructor"),
        ("plugins:\n  options:\n    a/b: 3", "x.yaml:3: plugins.options.a/b must be a mapping of settings, not 3."),
        ("a: &a\n" + "".join(f"{' ' * i}b:\n" for i in range(1, 20)), "nested more than"),
    ],
)
def test_errors_name_file_and_line(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in error(text, tmp_path)


def test_every_error_is_reported_at_once(tmp_path: Path) -> None:
    lines = error("cache:\n  page_size: 0\nserver:\n  port: 99999", tmp_path).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["x.yaml:2", "x.yaml:4"]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such\.yaml cannot be read: No such file"):
        load_config("no-such.yaml", environ={})


def test_environment_errors_name_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"FRAME_CACHE__PAGESIZE names no setting; did you mean FRAME_CACHE__PAGE_SIZE\?"):
        load_config(environ={"FRAME_CACHE__PAGESIZE": "1"})
    with pytest.raises(ConfigError, match=r"FRAME_MODEL_PATH names no setting; did you mean FRAME_MODEL__PATH\?"):
        load_config(environ={"FRAME_MODEL_PATH": "/model"})
    with pytest.raises(ConfigError, match=r"environment FRAME_PARALLEL__TP: parallel\.tp is 'x'"):
        load_config(environ={"FRAME_PARALLEL__TP": "x"})


def test_text_becomes_what_the_setting_is() -> None:
    environ = {
        "FRAME_SAMPLING__PROCESSORS": "a, b",
        "FRAME_PLUGINS__DENY": '["x", "y"]',
        "FRAME_SCHEDULER__OVERLAP": "no",
        "FRAME_TEXT__REASONING_PARSER": "",
        "FRAME_MODEL__SERVED_NAME": "12",
        "FRAME_CACHE__MEM_FRACTION": "5e-1",
        "FRAME_PLUGINS__OPTIONS": "{attention_backend/x: {splits: 2}}",
    }
    config = load_config(environ=environ).config
    assert config.sampling.processors == ("a", "b")
    assert config.plugins.deny == ("x", "y")
    assert config.scheduler.overlap is False
    assert config.text.reasoning_parser is None
    assert config.model.served_name == "12"
    assert config.cache.mem_fraction == 0.5
    assert config.plugins.options == {"attention_backend/x": {"splits": 2}}


@pytest.mark.parametrize("setting", ["api_key", "api_keys", "admin_key"])
def test_an_empty_key_opens_no_server(setting: str) -> None:
    server = load_config(environ={f"FRAME_SERVER__{setting.upper()}": ""}).config.server
    with pytest.raises(ConfigurationError, match=rf"server\.{setting}"):
        check_exposure(server)


def test_plugin_options_of_all_sources_are_merged_key_by_key(tmp_path: Path) -> None:
    text = "plugins:\n  options:\n    attention_backend/x: {a: 1, b: off, c: [1, 2]}\n    grammar_backend/y: {}\n"
    loaded = load(text, tmp_path, sets=["plugins.options.attention_backend/x.a=true", "cache.page_size=8"])
    options = {"attention_backend/x": {"a": True, "b": "off", "c": [1, 2]}, "grammar_backend/y": {}}
    assert loaded.config.plugins.options == options
    assert loaded.config.cache.page_size == 8
    assert loaded.source("plugins.options.attention_backend/x.a") == "flag --set plugins.options.attention_backend/x.a"
    assert loaded.source("plugins.options.attention_backend/x.b").endswith("x.yaml:3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cache.page_size", "has no value"),
        ("cache.pagesize=1", "did you mean 'page_size'"),
        ("plugins.options.x=1", "KIND/NAME.KEY"),
    ],
)
def test_set_errors(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(environ={}, sets=[text])


def test_the_seeds_flags_are_there() -> None:
    flags = {setting.flag for setting in settings()} | set(ALIASES)
    assert flags >= SEED_FLAGS


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("a=/x", ("a=/x",)),
        ("a=/x,b=/y=z", ("a=/x", "b=/y=z")),
        ('{"name": "a", "path": "/x", "base_model_name": "m"}', ("a=/x",)),
        ('{"name": "a", "path": "/x"},{"name": "b", "path": "/y"}', ("a=/x", "b=/y")),
    ],
)
def test_adapters_as_names_and_as_objects(text: str, modules: tuple[str, ...]) -> None:
    assert load_config(flags={"lora-modules": text, "enable-lora": True}, environ={}).config.adapters.modules == modules


@pytest.mark.parametrize("text", ["a", "=x", "a=", '{"name": "a"}', '{"name": "a", "path": "/x", "rank": 1}'])
def test_adapters_that_are_neither(text: str) -> None:
    with pytest.raises(ConfigError, match=r"adapters.modules"):
        load_config(flags={"lora-modules": text}, environ={})


def test_disable_radix_cache_means_no_prefix_cache() -> None:
    loaded = load_config(environ={}, flags={"disable-radix-cache": True})
    assert loaded.config.cache.prefix == "none"
    assert loaded.source("cache.prefix") == "flag --disable-radix-cache"
    with pytest.raises(ConfigError, match="contradict"):
        load_config(environ={}, flags={"disable-radix-cache": True, "prefix-cache": "radix"})


FRONT = ("server", "batches", "log", "media", "disaggregation")  # sections of the server around the engine


def test_flags_and_keywords_are_unique() -> None:
    flags = [setting.flag for setting in settings()]
    assert len(flags) == len(set(flags))
    chosen = {kind.key for kind in KINDS.values()}  # each kind has one setting that selects its plugins
    others = [setting for setting in settings() if setting.key not in chosen]
    assert len([setting for setting in others if setting.path[0] not in FRONT]) <= 88, "the core schema stays small"
    assert len(others) <= 155, "so does the server's"
    assert {setting.key for setting in by_keyword().values()} == set(by_key()), "each can be given to Engine(...)"


def test_engine_keywords(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("cache: {page_size: 1, eviction: mru}")
    loaded = from_keywords(
        {"FRAME_PARALLEL__TP": "4"},
        config=tmp_path / "x.yaml",
        model="/m",
        max_model_len=64,
        cache_page_size=16,
        scheduler={"overlap": True},
        disable_radix_cache=True,
        logits_processors=["a"],
        plugins={"options": {"grammar_backend/x": {"k": 1}}},
        **{"moe.runner": "loop"},
    )
    config = loaded.config
    assert (config.model.path, config.model.max_context, config.cache.page_size, config.cache.eviction) == ("/m", 64, 16, "mru")
    assert (config.parallel.tp, config.scheduler.overlap, config.cache.prefix, config.moe.runner) == (4, True, "none", "loop")
    assert config.sampling.processors == ("a",)
    assert config.plugins.options == {"grammar_backend/x": {"k": 1}}
    assert loaded.source("cache.page_size") == "keyword cache_page_size"


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"pagesize": 1}, "Unknown keyword 'pagesize'; did you mean 'page_size'"),
        ({"page_size": 1, "cache_page_size": 2}, "given twice: keyword page_size and keyword cache_page_size"),
        ({"page_size": 1, "cache": {"page_size": 2}}, "given twice"),
        ({"cache": {"pagesize": 2}}, "keyword cache: unknown key 'cache.pagesize'"),
        ({"tp": 0}, "keyword tp: parallel.tp is 0"),
        ({"tp": True}, "must not be true or false"),
    ],
)
def test_keyword_errors(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_keywords({}, **keywords)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 70_000), st.floats(), st.text(max_size=5))


@pytest.mark.slow
@given(key=st.sampled_from(sorted(by_key())), value=SCALARS)
@example(key="server.response_store_ttl", value=math.inf)
@example(key="scheduler.request_timeout", value=math.nan)
def test_any_value_is_taken_or_refused_by_its_name(key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    try:
        loaded = from_keywords({}, **{section: {name: value}})
    except ConfigError as error:
        assert key in str(error)
    else:
        assert FrameConfig.model_validate_json(loaded.config.model_dump_json()) == loaded.config


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MODEL", "MODEL__PATH"), ("PAGE_SIZE", "CACHE__PAGE_SIZE"), ("CACHE_PAGE_SIZE", "CACHE__PAGE_SIZE"),
        ("SCHEDULR", "SCHEDULER__FIELD"), ("SCHEDULE_POLICY", "SCHEDULER__POLICY"), ("LOG", "LOG__FIELD"),
        ("CONFG", "CONFIG"), ("PORT", "SERVER__PORT"),
    ],
)  # fmt: skip
def test_variables_that_resemble_a_setting_are_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={f"FRAME_{name}": "1"})
    assert str(caught.value) == f"The environment variable FRAME_{name} names no setting; did you mean FRAME_{meant}?"


def test_variables_of_others_are_no_settings() -> None:
    """Those that frame reads elsewhere, those of other programs, and those that Kubernetes sets
    beside the services `frame` and `frame-server`."""
    ours = dict.fromkeys(ENV_OTHERS - {"FRAME_CONFIG"}, "1")
    cluster = {"FRAME_PORT": "tcp://10.0.0.1:80", "FRAME_SERVICE_PORT": "80", "FRAME_PORT_80_TCP_PORT": "80"}
    cluster |= {"FRAME_SERVER_PORT": "tcp://10.0.0.1:80", "FRAME_SERVER_SERVICE_HOST": "10.0.0.1"}
    load_config(environ={**ours, **cluster, "FRAME_VERSION": "1", "FRAME_FAKE_STEP": "1"})
