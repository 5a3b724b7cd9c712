"""The `frame` command as a user meets it: what is printed, and the exit codes 0, 2 and 78. How fast
it is stands in test_startup."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from frame.config.hardware import Hardware
from frame.config.schema import FrameConfig
from frame.entrypoints.cli.main import COMMANDS, cli
from frame.entrypoints.cli.options import config_command
from frame.entrypoints.configuration.flat_settings import settings
from frame.entrypoints.configuration.sources import LoadedConfig
from frame.interfaces.kinds import KINDS
from frame.plugins import loader
from tests.model_configs import DENSE


def frame(*arguments: object, **environ: str) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], env={"FRAME_CONFIG": "", **environ})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "dense"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DENSE))
    return folder


def test_help_lists_commands_and_exit_codes() -> None:
    result = frame("--help")
    assert result.exit_code == 0
    assert "78 wrong" in result.output
    for name in ("config", "plugins"):
        assert COMMANDS[name][1] in result.output


def test_every_listed_command_has_help() -> None:
    for name in cli.list_commands(None):  # type: ignore[arg-type]
        result = frame(name, "--help")
        assert result.exit_code == 0, (name, result.output, result.exception)


def test_no_flag_of_a_command_hides_a_setting() -> None:
    for name in cli.list_commands(None):  # type: ignore[arg-type]
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        flags = [flag for param in command.params for flag in (*param.opts, *param.secondary_opts)]
        assert len(flags) == len(set(flags)), name


def test_wrong_usage_is_2() -> None:
    assert frame("no-such-command").exit_code == 2
    assert frame("config", "show", "--no-such-flag").exit_code == 2


def test_every_setting_has_a_flag_in_help() -> None:
    text = frame("config", "check", "--help", "all").output
    for setting in settings():
        assert setting.shape == "table" or f"--{setting.flag}" in text, setting.key
    assert "--disable-radix-cache" in text
    assert "Settings: cache" in text
    shown = ("tensor-parallel ranks. [1]", "from the attention backend. [auto]", "without a seed. [0]")
    assert [" ".join(text.split()).count(part) for part in shown] == [1, 1, 1]


def test_plugins_list_in_words_and_json() -> None:
    words = frame("plugins", "list")
    assert words.exit_code == 0
    assert "fcfs" in words.output
    data = json.loads(frame("plugins", "list", "--json").output)
    by_name = {(each["kind"], each["name"]): each for each in data["plugins"]}
    assert by_name["scheduling_policy", "fcfs"]["distribution"] == "frame-serve"
    assert {each["kind"] for each in data["plugins"]} <= set(KINDS)
    only = json.loads(frame("plugins", "list", "--json", "--kind", "eviction_policy").output)
    assert {each["kind"] for each in only["plugins"]} == {"eviction_policy"}


@pytest.mark.slow
def test_every_plugin_has_a_summary_and_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = loader.load_registry()
    monkeypatch.setattr(loader, "load_registry", lambda *_, **__: registry)  # read once for all
    for each in json.loads(frame("plugins", "list", "--json").output)["plugins"]:
        assert each["summary"], each["name"]
        shown = frame("plugins", "info", f"{each['kind']}/{each['name']}")
        assert shown.exit_code == 0
        assert each["target"] in shown.output


def test_plugins_list_by_what_this_machine_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.entrypoints.configuration.hardware_probe.probe", lambda: Hardware(cpu_cores=1, memory_bytes=2**30))
    usable, unusable = (frame("plugins", "list", "--kind", "attention_backend", flag).output for flag in ("--usable", "--unusable"))
    assert "torch_native" in usable
    assert "triton" not in usable
    assert "(runs on cuda, which this machine lacks)" in unusable


def test_plugins_info_shows_what_selects_a_plugin() -> None:
    assert "  selected by: scheduler.policy: fcfs\n" in frame("plugins", "info", "fcfs").output
    assert "  selected by: sampling.processors: [penalties], or [builtin], the default\n" in frame("plugins", "info", "penalties").output


def test_plugins_list_and_info_show_a_denied_plugin() -> None:
    deny = ("--plugins-deny", "logits_processor/penalties")
    for command in (("list", "--kind", "logits_processor", "--unusable"), ("info", "penalties")):
        assert "cannot be used: plugins.deny excludes it (try plugins.deny: [])" in frame("plugins", *command, *deny).output


def test_plugins_info_of_an_unknown_name() -> None:
    result = frame("plugins", "info", "fcsf")
    assert result.exit_code == 78
    assert "No plugin is called 'fcsf'; did you mean 'fcfs'?" in result.output


def test_plugins_check_loads_it_elsewhere() -> None:
    result = frame("plugins", "check", "scheduling_policy/fcfs")
    assert (result.exit_code, result.output.strip()) == (0, "scheduling_policy/fcfs: loads (frame.plugins.scheduling_policies.fcfs:Fcfs)")


def test_plugins_new_writes_a_package(tmp_path: Path) -> None:
    result = frame("plugins", "new", "scheduling_policy", "mine", "--dir", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "frame-mine" / "pyproject.toml").is_file()
    assert "frame plugins check scheduling_policy/mine" in result.output
    assert frame("plugins", "new", "scheduling_policy", "mine", "--dir", tmp_path).exit_code == 78
    assert frame("plugins", "new", "policy", "mine").exit_code == 2


def test_plugins_new_refuses_a_name_that_is_taken(tmp_path: Path) -> None:
    result = frame("plugins", "new", "scheduling_policy", "fcfs", "--dir", tmp_path)
    assert result.exit_code == 78
    assert "There is a scheduling_policy called 'fcfs' already, from frame-serve; choose another name." in result.output
    assert not list(tmp_path.iterdir())


def test_a_model_without_its_flag_gets_a_hint() -> None:
    result = frame("serve", "frame-tiny")
    assert result.exit_code == 2
    assert "extra argument (frame-tiny); name the model with --model" in result.output


def test_config_check_says_what_would_run(model: Path) -> None:
    files = ("--load-format", "dummy", "--skip-tokenizer-init")  # of which the folder has none
    result = frame("config", "check", "--model", model, "--device", "cpu", "--port", "0", *files)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("ok: dense (LlamaForCausalLM) on cpu in float32")
    assert "scheduling_policy: fcfs" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--page-size", "many"), "flag --page-size: cache.page_size is 'many'"),
        (("--tp", "3"), "Nearest change: parallel.tp: 2"),
        (("--max-model-len", "4096"), "Nearest change: model.max_context: 512"),
        (("--schedule-policy", "fcsf"), "did you mean 'fcfs'"),
        (("--set", "cache.pagesize=1"), "did you mean 'page_size'"),
        (("--grammar-backend", "automata", "--plugins-deny", "frame-automata"), "package"),  # denied, or not installed
        (("--quantization", "gguf", "--plugins-deny", "frame-gguf"), "package"),
        (("--load-format", "gguf", "--plugins-deny", "frame-gguf"), "package"),
        (("--set", 'plugins.options.weight_format/int8.ignore=["("]'), "int8.ignore.0 is '(': missing )"),
        (("--quantization", "no-such"), "model.quantization: Unknown weight_format 'no-such'"),
        (("--config", "no-such.yaml"), "no-such.yaml cannot be read"),
        (("--model", "no-such-folder"), "no-such-folder' is no folder"),
        (("--model", ""), "flag --model: model.path is ''; it should have at least 1 character."),
        (("--tokenizer", "./no-such/folder"), "model.tokenizer './no-such/folder' is not a folder; name a folder with a tokenizer.json"),
        (("--tokenizer", "no-such/name"), "model.tokenizer 'no-such/name' is not a folder; the cache"),
        (("--chat-template", "no-such.jinja"), "text.chat_template 'no-such.jinja' cannot be read (No such file or directory)"),
        (("--moderation-policy", "no-such.txt"), "text.moderation_policy 'no-such.txt' cannot be read"),
        (("--threads", "1000000"), "execution.threads is '1000000'; it should be less than or equal to 1024."),
        (("--set", "foo=1"), "unknown key 'foo'; `frame config show` lists every key."),
        (("--set", "attention.backend.prefill=x"), "did you mean attention.backend?"),
        (("--plugins-deny", "frame-serve"), "plugins.deny names frame-serve, whose plugins are always read"),
        (("--seed", str(1 << 63)), "model.seed is '9223372036854775808'; it should be less than"),
    ],
)
def test_configuration_errors_are_78_and_a_sentence(arguments: tuple[str, ...], words: str, model: Path) -> None:
    result = frame("config", "check", "--model", model, "--device", "cpu", *arguments)
    assert result.exit_code == 78, result.output
    assert words in result.output
    assert "Traceback" not in result.output


def test_config_check_makes_the_processors_of_media(tmp_path: Path) -> None:
    from tests.models.media_checkpoints import make_media_checkpoint

    arguments = ("config", "check", "--model", make_media_checkpoint(tmp_path, "Qwen3VLForConditionalGeneration"), "--device", "cpu")
    done = frame(*arguments, "--port", "0")
    assert done.exit_code == 0
    assert "processors of image and video" in done.output
    done = frame(*arguments, "--mm-processor-kwargs", '{"nonsense": 1}')
    assert done.exit_code == 78
    assert "nonsense is no option of the checkpoint's image processor" in done.output


def test_a_checkpoint_whose_format_is_in_a_package_names_it(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "stored")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}))
    result = frame("config", "check", "--model", folder, "--device", "cpu", "--plugins-deny", "frame-bitsandbytes")
    assert result.exit_code == 78, result.output
    assert re.search(r"No weight format loads bitsandbytes weights\. The .*package.*[ /]frame-bitsandbytes", result.output), result.output


@pytest.mark.parametrize(
    ("flag", "content", "words"),
    [
        ("--chat-template", b"{% if %}", "the chat template does not compile"),
        ("--chat-template", b"{% if a %}" * 3_000 + b"{% endif %}" * 3_000, "named: the chat template does not compile: its expressions"),
        ("--chat-template", b"\xff\xfe", "cannot be read (it is not UTF-8 text)"),
        ("--score-prompt", b"{query}", "has no {document}"),
    ],
)
def test_named_files_are_read_before_anything_starts(flag: str, content: bytes, words: str, model: Path) -> None:
    (model / "named").write_bytes(content)
    result = frame("config", "check", "--model", model, flag, model / "named")
    assert result.exit_code == 78, result.output
    assert words in result.output


def test_explain_gives_value_source_reason_and_everyone_turned_down(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"model:\n  path: {model}\nexecution:\n  device: cpu\n")
    common = ("config", "explain", "--config", tmp_path / "x.yaml")
    assert frame(*common, "model.path").output.strip() == f"model.path = {model}  ({tmp_path}/x.yaml:2)"
    page = frame(*common, "--page-size", "4", "page_size").output
    assert page.strip() == "cache.page_size = 4  (flag --page-size)"
    dtype = frame(*common, "dtype").output
    assert dtype.startswith("model.dtype = float32  (chosen: exact")
    architecture = frame(*common, "model.implementation").output
    assert "(chosen: llama is" in architecture
    assert re.search("not qwen3: implements .*Qwen3ForCausalLM.*, not LlamaForCausalLM", architecture)
    everything = frame(*common).output
    assert all(f"{setting.key} = " in everything for setting in settings())


def test_explain_of_a_section_and_of_no_setting(model: Path) -> None:
    lines = frame("config", "explain", "moe", "--model", model).output.splitlines()
    assert [line.partition(" ")[0] for line in lines if not line.startswith(" ")] == ["moe.runner", "moe.dispatcher"]
    assert "There is no setting 'qqqq'; `frame config show` lists" in frame("config", "explain", "qqqq", "--model", model).output


def test_explain_of_an_impossible_configuration_still_shows_the_value(model: Path) -> None:
    result = frame("config", "explain", "--model", model, "--tp", "3", "tp")
    assert result.exit_code == 78
    assert "parallel.tp = 3  (flag --tp)" in result.output
    assert "does not divide" in result.output
    assert "did you mean" in frame("config", "explain", "pagesize").output


def test_show_is_a_configuration_file_again(tmp_path: Path, model: Path) -> None:
    shown = frame("config", "show", "--page-size", "8", "--disable-radix-cache", "--set", "plugins.options.a/b.c=off")
    assert "page_size: 8  # flag --page-size" in shown.output
    file = tmp_path / "again.yaml"
    file.write_text(shown.output)
    assert frame("config", "show", "--config", file, "--json").output == frame(
        "config", "show", "--page-size", "8", "--disable-radix-cache", "--set", "plugins.options.a/b.c=off", "--json"
    ).output  # fmt: skip
    resolved = frame("config", "show", "--resolved", "--model", model, "--device", "cpu")
    values = yaml.safe_load(resolved.output)
    assert values["cache"]["page_size"] is not None
    assert values["attention"]["backend"]
    file.write_text(resolved.output)
    again = frame("config", "show", "--resolved", "--config", file, "--json")
    assert FrameConfig.model_validate_json(again.output) == FrameConfig.model_validate(values)


def test_secrets_are_not_shown() -> None:
    for arguments in (("config", "show"), ("config", "show", "--json"), ("config", "explain", "api-key", "--model", "no-such")):
        result = frame(*arguments, FRAME_SERVER__API_KEY="hunter2")
        assert "***" in result.output
        assert "hunter2" not in result.output


def test_a_command_of_ones_own_gets_all_flags() -> None:
    seen: list[tuple[LoadedConfig, dict[str, Any]]] = []

    @config_command(help="Test.")
    def mine(loaded: LoadedConfig, **own: Any) -> None:
        seen.append((loaded, own))

    result = CliRunner().invoke(
        mine, ["--tp", "2", "--no-overlap", "--trust-remote-code", "--plugins-deny", "a,b"], env={"FRAME_CONFIG": ""}
    )
    assert result.exit_code == 0, result.output
    ((loaded, own),) = seen
    assert own == {}
    assert (loaded.config.parallel.tp, loaded.config.scheduler.overlap, loaded.config.model.trust_remote_code) == (2, False, True)
    assert loaded.config.plugins.deny == ("a", "b")
    assert loaded.source("scheduler.overlap") == "flag --no-overlap"
