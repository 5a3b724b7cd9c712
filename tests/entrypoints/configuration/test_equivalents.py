"""The flags of vLLM, SGLang and llama.cpp: what the table proposes exists."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from frame import Engine
from frame.core.errors import ConfigError
from frame.entrypoints.cli.main import cli
from frame.entrypoints.cli.serve import command
from frame.entrypoints.configuration.equivalents import BY_FLAG, EQUIVALENTS, Equivalent, describe_flags
from frame.entrypoints.configuration.flat_settings import by_key

REAL = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}


def test_the_table_is_of_a_size_and_without_doubles() -> None:
    assert sum(len(row.names) for row in EQUIVALENTS) == len(BY_FLAG) >= 150
    assert {name for row in EQUIVALENTS for name in row.servers} == {"vLLM", "SGLang", "llama.cpp"}


@pytest.mark.parametrize("row", EQUIVALENTS, ids=lambda row: row.names[0])
def test_what_is_proposed_are_real_flags(row: Equivalent) -> None:
    assert not set(row.names) & set(REAL), "frame has this flag: it needs no row"
    proposed = [word.rstrip(";,") for word in f"{row.use} {row.note}".replace("(", " ").replace(")", " ").split() if word.startswith("--")]
    proposed = [word for word in proposed if word != "--kind"]  # of `frame plugins list`
    assert set(proposed) <= set(REAL)
    assert row.use or row.note
    if row.values and row.use:
        choices = next(setting.choices for setting in by_key().values() if f"--{setting.flag}" == row.use.split()[0])
        assert not choices or set(row.values.values()) <= set(choices)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("-c 4096", "-c (of llama.cpp); did you mean --max-model-len 4096? (of one sequence; --max-total-tokens sets the KV cache)"),
        ("-ngl 0", "-ngl (of llama.cpp); did you mean --device cpu? (all layers run on one device)"),
        ("-ngl 99", "-ngl (of llama.cpp); did you mean --device cuda? (all layers run on one device)"),
        ("-ctk q8_0", "-ctk (of llama.cpp); did you mean --kv-cache-dtype int8? (one type for keys and values)"),
        ("--tensor-parallel-size 2", "--tensor-parallel-size (of vLLM and SGLang); did you mean --tp 2?"),
        ("--gpu-memory-utilization=0.9", "--gpu-memory-utilization (of vLLM); did you mean --mem-fraction-static 0.9?"),
        ("--task embedding", "--task (of vLLM); did you mean --model-task embed? (generate, embed or classify)"),
        ("--model-path", "--model-path (of SGLang); did you mean --model VALUE?"),
    ],
)
def test_values_are_carried_over(arguments: str, sentence: str) -> None:
    assert describe_flags(arguments.split(), list(REAL)) == [f"No such option: {sentence}"]


def test_known_flags_and_arguments_after_the_dashes_are_left_out() -> None:
    assert describe_flags(["--tp", "2", "--", "-m"], list(REAL)) == []


@pytest.mark.parametrize("name", ["serve", "config check", "chat"])
def test_a_command_names_all_of_them_at_once(name: str) -> None:
    result = CliRunner().invoke(cli, [*name.split(), "--max-num-seqs", "8", "--enable-auto-tool-choice"])
    assert result.exit_code == 2
    assert "--max-num-seqs (of vLLM); did you mean --max-running-requests 8?" in result.output
    assert "--enable-auto-tool-choice (of vLLM); leave it out" in result.output


def test_keywords_of_other_engines_are_named() -> None:
    with pytest.raises(ConfigError, match="Unknown keyword 'tensor_parallel_size'; did you mean 'tp'"):
        Engine(tensor_parallel_size=2)
