"""The conformance suite of subcommands: what help costs and shows, how wrong calls end, and what a
call leaves behind. Must not know a plugin by name."""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
from click.testing import CliRunner, Result

from frame.core.errors import ConfigurationError
from frame.host.interpreter import child_environment, python_command
from frame.interfaces.cli import CliCommand, CommandContext
from frame.testing.conformance import Check, SkipCheck, Subject, collect, unchanged_process
from frame.testing.generators import leaves_nothing

MAX_SECONDS = 1.0  # of CPU, for the module, the constructor, `make_command` and the help
HEAVY = ("torch", "transformers")
WIDTH = 60  # characters of a command's line in a group's help
ODD_VALUES = ("", "nan", "-1", "x", "1e999", "0", "ü 🙂", "{", "a/../b", "%s", "--")  # in place of an argument
UNKNOWN = "--no-such-option-of-any-command"
# Makes the command in a process of its own, shows its help and prints the cost.
MEASURE = """
import importlib, importlib.util, json, sys, time
name, file, attribute, heavy = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4].split(",")
from frame.interfaces.cli import CommandContext
import click.testing
began = time.process_time()
if importlib.util.find_spec(name.partition(".")[0]) is None:
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
else:
    module = importlib.import_module(name)
command = getattr(module, attribute)(CommandContext(), None).make_command()
click.testing.CliRunner().invoke(command, ["--help"])
print(json.dumps([time.process_time() - began, [each for each in heavy if each in sys.modules]]))
"""


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of a command."""

    def make() -> click.Command:
        command: CliCommand = subject.target(CommandContext(), subject.options)
        return command.make_command()

    yield from collect(__name__, make)
    yield Check("appears_at_once", partial(_appears_at_once, subject))
    yield Check("runs", partial(_runs, subject, make))
    yield Check("calls_are_apart", partial(_calls_are_apart, subject))
    yield Check("output_that_fails_is_a_failure", partial(_output_that_fails_is_a_failure, subject, make))
    yield Check("prints_what_it_states", partial(_prints_what_it_states, subject, make))
    yield Check("wrong_values_end_in_a_sentence", partial(_wrong_values_end_in_a_sentence, subject, make))
    yield Check("unusable_files_are_failures", partial(_unusable_files_are_failures, subject, make))


def check_is_a_command(make: Callable[[], Any]) -> None:
    assert isinstance(make(), click.Command), "make_command() returns no click command; decorate the function with click.command"


def check_is_made_anew(make: Callable[[], click.Command]) -> None:
    first, second = make(), make()
    assert first is not second, "make_command() returns the same command twice"
    described = [command.to_info_dict(click.Context(command)) for command in (first, second)]
    assert described[0] == described[1], "make_command() returns another command the second time"
    _invoke(first, "--help")
    assert first.to_info_dict(click.Context(first)) == described[0], "the help changes the command"


def check_is_made_without_effect(make: Callable[[], click.Command]) -> None:
    with unchanged_process("making the command and its help change"):
        with contextlib.redirect_stdout(io.StringIO()) as output, leaves_nothing("making the command"):
            command = make()
        assert not output.getvalue(), "making the command prints to standard output"
        _invoke(command, "--help")


def check_is_made_for_every_user(make: Callable[[], click.Command]) -> None:
    """In an empty home folder too, and without writing to it: other commands' help makes it."""
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, {"HOME": home, "XDG_CONFIG_HOME": home}):
        _invoke(make(), "--help")
        left = [path.name for path in Path(home).iterdir()]
    assert not left, f"making the command leaves {left[0]} in the user's home folder"


def check_has_help_texts(make: Callable[[], click.Command]) -> None:
    for path, command in _walk(make()):
        assert bool(command.help), f"{path} has no help text"
        short = command.get_short_help_str(WIDTH)
        assert not short.endswith("..."), f"the first sentence of {path}'s help has more than {WIDTH} characters"
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert bool(parameter.help), f"{path}: the option {parameter.opts[0]} has no help text"


def check_shows_its_help(make: Callable[[], click.Command]) -> None:
    for path, command in _walk(make()):
        result = _invoke(command, "--help")
        assert result.exit_code == 0, f"{path} --help ends with exit code {result.exit_code}"
        first = (command.help or "").split()[:1]
        assert bool(first) and first[0] in result.output, f"{path} --help does not show the help text"


def check_has_no_parameter_twice(make: Callable[[], click.Command]) -> None:
    for path, command in _walk(make()):
        flags = Counter(flag for each in command.params if isinstance(each, click.Option) for flag in (*each.opts, *each.secondary_opts))
        twice = [flag for flag, count in flags.items() if count > 1]
        assert not twice, f"{path} has the option {twice[0] if twice else ''} twice"


def check_refuses_unknown_options(make: Callable[[], click.Command]) -> None:
    for path, command in _walk(make()):
        if any(isinstance(each, click.Argument) and each.nargs == -1 and each.type is click.UNPROCESSED for each in command.params):
            continue  # it passes its arguments on
        result = _invoke(command, UNKNOWN)
        assert result.exit_code == 2, f"{path} ends with exit code {result.exit_code} for an unknown option, and not with 2"
        assert UNKNOWN in result.output, f"{path} does not name the unknown option"


def _appears_at_once(subject: Subject) -> None:
    target = subject.target
    arguments = (target.__module__, inspect.getfile(target), target.__qualname__, ",".join(HEAVY))
    path = os.pathsep.join(path or "." for path in sys.path)
    command, environment = python_command("-c", MEASURE, *arguments), {"PYTHONPATH": path}
    for _ in range(3):  # the first may read the modules from a disk, beside other work
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=child_environment(environment))
        assert done.returncode == 0, f"the command cannot be made in a process of its own: {(done.stderr.splitlines() or ['?'])[-1]}"
        seconds, heavy = json.loads(done.stdout.splitlines()[-1])
        assert not heavy, f"the help imports {' and '.join(heavy)}; import it in the function of the command"
        if seconds <= MAX_SECONDS:
            return
    raise AssertionError(f"the help takes {seconds:.1f} s of CPU time")


def _runs(subject: Subject, make: Callable[[], click.Command]) -> None:
    calls = _list_calls(subject)
    with unchanged_process("a call changes"):
        for arguments in calls:
            results = [_invoke(command, *arguments) for command in (make(), make())]
            for result in results:
                assert result.exit_code == 0, f"the call with {arguments} ends with exit code {result.exit_code}: {result.exception!r}"


def _list_calls(subject: Subject) -> Sequence[tuple[str, ...]]:
    calls: Sequence[tuple[str, ...]] = getattr(subject.target, "conformance_arguments", ())
    if not calls:
        raise SkipCheck("the class has no conformance_arguments; list calls that end soon")
    return calls


def _prints_what_it_states(subject: Subject, make: Callable[[], click.Command]) -> None:
    """The class's own examples, `conformance_outputs`."""
    stated: Sequence[tuple[tuple[str, ...], str]] = getattr(subject.target, "conformance_outputs", ())
    if not stated:
        raise SkipCheck("the class has no conformance_outputs: what its calls print is not checked")
    with unchanged_process("a call changes"):
        for arguments, expected in stated:
            result = _invoke(make(), *arguments)
            assert result.exit_code == 0, f"the call with {arguments} ends with exit code {result.exit_code}: {result.exception!r}"
            assert result.output == expected, f"the call with {arguments} prints {result.output!r:.100} and not {expected!r:.100}"


def _calls_are_apart(subject: Subject) -> None:
    """A call prints what it prints alone, after other calls of the same object."""
    calls = _list_calls(subject)
    with unchanged_process("a call changes"):
        _compare_calls(subject, calls)


def _compare_calls(subject: Subject, calls: Sequence[tuple[str, ...]]) -> None:
    def run(one: CliCommand | None, arguments: tuple[str, ...]) -> str:
        maker: CliCommand = one or subject.target(CommandContext(), subject.options)
        return _invoke(maker.make_command(), *arguments).output

    alone = [run(None, each) for each in calls]
    if alone == [run(None, each) for each in calls]:  # what it prints depends on no clock
        shared: CliCommand = subject.target(CommandContext(), subject.options)
        for _ in range(2):
            for arguments, expected in zip(calls, alone, strict=True):
                output = run(shared, arguments)
                assert output == expected, f"after other calls, {arguments} prints {output!r:.100} and not {expected!r:.100}"


class _FullDisk(io.StringIO):
    """Takes no text."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _output_that_fails_is_a_failure(subject: Subject, make: Callable[[], click.Command]) -> None:
    """A call that prints does not end with exit code 0 where its output cannot be written."""
    for arguments in _list_calls(subject):
        with unchanged_process("a call changes"):
            if not _invoke(make(), *arguments).stdout:
                continue
            with contextlib.redirect_stdout(_FullDisk()):
                try:
                    make().main([*arguments], prog_name="frame x", standalone_mode=True)
                except SystemExit as end:
                    assert end.code, f"the call with {arguments} ends with exit code 0, though its output cannot be written"
                except Exception as error:  # noqa: BLE001 - a failure, as it should be
                    assert not isinstance(error, AssertionError), str(error)


def _wrong_values_end_in_a_sentence(subject: Subject, make: Callable[[], click.Command]) -> None:
    """Each argument of the class's calls is replaced by an odd value: the call succeeds, or ends
    with one of the exit codes of the contract, and not in a stack trace."""
    with unchanged_process("a call changes"), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for arguments in _list_calls(subject):
            for place in range(len(arguments)):
                for value in ODD_VALUES:
                    changed = (*arguments[:place], value, *arguments[place + 1 :])
                    with mock.patch("os._exit", _refuse_to_exit):
                        result = _invoke(make(), *changed)
                    error = result.exception
                    is_told = error is None or isinstance(error, SystemExit | ConfigurationError)
                    assert is_told, f"the call with {changed!r:.120} ends with {type(error).__name__} and not with a sentence"
                    is_known = isinstance(error, ConfigurationError) or result.exit_code in (0, 1, 2, 78)
                    assert is_known, f"the call with {changed!r:.120} ends with exit code {result.exit_code}"


def _refuse_to_exit(code: int) -> None:
    raise RuntimeError(f"it calls os._exit({code}); raise click.ClickException")


def _unusable_files_are_failures(subject: Subject, make: Callable[[], click.Command]) -> None:
    """A file that can neither be read nor written, for each option of a path: the exit code is not
    0."""
    command = make()
    paths = [each for each in command.params if isinstance(each, click.Option) and isinstance(each.type, click.Path | click.File)]
    for option in paths:
        for arguments in _list_calls(subject):
            with tempfile.NamedTemporaryFile() as file:
                changed = (option.opts[0], f"{file.name}/none", *arguments)
                with unchanged_process("a call changes"):
                    result = _invoke(make(), *changed)
                assert result.exit_code, f"the call with {changed} ends with exit code 0, though nothing can be at this path"


def _walk(command: click.Command, path: str = "the command") -> Iterator[tuple[str, click.Command]]:
    """The command and its subcommands."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None, f"{path} lists {name} and has no such command"
            assert subcommand is not None
            yield from _walk(subcommand, f"{path} {name}")


def _invoke(command: click.Command, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, prog_name="frame x")
