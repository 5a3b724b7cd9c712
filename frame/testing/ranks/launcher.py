"""The conformance suite of `launcher/1`: places of ranks, and small processes that say how they
were started. Must not know a launcher by name."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from frame.host.interpreter import child_environment, python_command
from frame.interfaces.launcher import Launcher, LauncherCapabilities, LauncherContext, Placement, RankProcess
from frame.testing.conformance import Check, Subject, find_checks
from frame.testing.generators import leaves_nothing, require_fast

_RANKS = 4
_MANY_RANKS = 20  # more than a host of eight devices has
_MAX_POLL_SECONDS = 5e-3
_PATIENCE = 20.0  # seconds
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def suite(subject: Subject) -> Iterable[Check]:
    """The checks of a launcher."""
    for name, check in find_checks(__name__):
        yield Check(name, partial(_with_launcher, subject, check))
    yield Check("two_engines_do_not_meet", partial(_two_engines, subject))
    yield Check("many_ranks_have_places", partial(_with_launcher, subject, check_no_device_has_two_ranks, _MANY_RANKS))
    yield Check("starts_leave_nothing", partial(_starts_leave_nothing, subject))
    yield Check("early_process_is_taken", partial(_takes_early, subject))


@contextmanager
def _opened(subject: Subject, folder: Path, size: int = _RANKS, **fields: Any) -> Iterator[Launcher]:
    """A launcher of `size` ranks, or as many as it can start."""
    can = subject.record.capabilities
    maximum = can.max_size if isinstance(can, LauncherCapabilities) else None
    launcher: Launcher = subject.target(LauncherContext(min(size, maximum or size), folder, **fields), subject.options)
    try:
        yield launcher
    finally:
        launcher.close()


def _with_launcher(subject: Subject, check: Callable[[Launcher], None], size: int = _RANKS) -> None:
    with tempfile.TemporaryDirectory() as folder, _opened(subject, Path(folder), size) as launcher:
        check(launcher)


def _two_engines(subject: Subject) -> None:
    """Two engines of one user, whose folders are beside each other."""
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent) / name for name in ("engine-1", "engine-2")]
        for folder in folders:
            folder.mkdir()
        with _opened(subject, folders[0]) as one, _opened(subject, folders[1]) as other:
            addresses = [launcher.place().rendezvous for launcher in (one, other, one, other)]
    apart = set(addresses[::2]).isdisjoint(addresses[1::2])
    assert apart, f"the ranks of two engines meet at one address, {addresses[1]}"


def _starts_leave_nothing(subject: Subject) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        leaves_nothing("six starts, and close,", threads=False),
        _opened(subject, Path(folder)) as launcher,
    ):
        for _ in range(6):
            with _started(launcher, "pass") as process:
                _exit_code(process)


def _takes_early(subject: Subject) -> None:
    """A launcher that calls `take_early` passes on what it was given, and returns that process, or
    starts one where there is none."""
    calls: list[tuple[Any, ...]] = []
    waiting: list[RankProcess] = []

    def take(command: Sequence[str], environment: Mapping[str, str], pipes_errors: bool) -> RankProcess | None:
        calls.append((command, environment, pipes_errors))
        return waiting.pop() if waiting else None

    command, variables = python_command("-c", "import sys; sys.stdin.read(); sys.exit(6)"), {"FRAME_EARLY": "1"}
    early = subprocess.Popen(command, env=child_environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    waiting.append(early)  # type: ignore[arg-type]
    started: list[RankProcess] = []
    try:
        with tempfile.TemporaryDirectory() as folder, _opened(subject, Path(folder), take_early=take) as launcher:
            place = launcher.place().ranks[0]
            started += [launcher.start(place, command, variables, pipes_errors=True) for _ in range(2)]
            if not calls:  # it need not call it
                return
            assert all(call == (command, variables, True) for call in calls), f"take_early is called with {calls[0]!r:.200}"
            assert started[0].pid == early.pid, "the process that take_early returns is not the rank's"
            assert started[1].pid != early.pid, "where take_early returns None, the rank needs a process of its own"
    finally:
        for process in (early, *started):
            _end(process)


@contextmanager
def _started(launcher: Launcher, code: str, rank: int = 0, environment: dict[str, str] | None = None) -> Iterator[RankProcess]:
    """A rank that runs Python `code`, ended afterwards."""
    place = launcher.place().ranks[rank]
    process = launcher.start(place, python_command("-c", code), environment or {}, pipes_errors=True)
    try:
        yield process
    finally:
        _end(process)


def _end(process: RankProcess) -> None:
    if process.poll() is None:
        process.kill()
        process.wait(_PATIENCE)
    for pipe in (process.stdin, process.stderr):
        if pipe is not None:
            pipe.close()


def _line(process: RankProcess) -> str:
    assert process.stderr is not None, "standard error must be a pipe if pipes_errors is true"
    return process.stderr.readline().decode().strip()


def check_every_rank_has_a_place(launcher: Launcher) -> None:
    placement = launcher.place()
    assert isinstance(placement, Placement)
    assert [place.rank for place in placement.ranks] == list(range(launcher.context.size)), "place returns each rank once, in order"
    assert all(place.host and place.local_index >= 0 for place in placement.ranks), "each rank has a host and the index of a device"


def check_no_device_has_two_ranks(launcher: Launcher) -> None:
    places = [(place.host, place.local_index) for place in launcher.place().ranks]
    assert len(set(places)) == len(places), "two ranks must not have the same device"


def check_the_rendezvous_is_an_address(launcher: Launcher) -> None:
    placement = launcher.place()
    address = urlsplit(placement.rendezvous)
    if address.scheme == "tcp":
        assert address.hostname == placement.ranks[0].host and address.port, "the rendezvous must be a port of rank 0's host"
        return
    assert address.scheme == "file" and Path(address.path).is_absolute(), "the rendezvous must be file:///PATH or tcp://HOST:PORT"
    assert Path(address.path).parent.is_dir(), "the folder of the rendezvous must exist"
    assert len({place.host for place in placement.ranks}) == 1, "ranks of several hosts cannot meet in a file"


def check_the_rendezvous_is_new(launcher: Launcher) -> None:
    first = urlsplit(launcher.place().rendezvous)
    if first.scheme == "file":
        Path(first.path).write_text("left by the previous start")
    second = urlsplit(launcher.place().rendezvous)
    if second.scheme == "file":
        assert not Path(second.path).exists(), "the rendezvous file of the previous start must be gone"
    else:
        assert second.port != first.port, "ranks of the previous start may still listen on its port"


def check_commands_run_with_their_environment(launcher: Launcher) -> None:
    code = "import os, sys; print(os.environ['FRAME_CHECK'], 'PATH' in os.environ, file=sys.stderr, flush=True)"
    with _started(launcher, code, environment={"FRAME_CHECK": "a b"}) as process:
        assert _line(process) == "a b True", "the environment is the inherited one with the given variables"
    assert os.environ.pop("FRAME_CHECK", None) is None, "the variables of a rank must not change this process"


def check_variables_replace_inherited_ones(launcher: Launcher) -> None:
    code = "import os, sys; print(os.environ['FRAME_INHERITED'], os.environ['FRAME_KEPT'], file=sys.stderr, flush=True)"
    os.environ.update(FRAME_INHERITED="old", FRAME_KEPT="kept")
    try:
        with _started(launcher, code, environment={"FRAME_INHERITED": "new"}) as process:
            line = _line(process)
    finally:
        for name in ("FRAME_INHERITED", "FRAME_KEPT"):
            os.environ.pop(name, None)
    assert line == "new kept", f"a rank has the values {line!r}: a variable of the call replaces an inherited one, and the others stay"


def check_ranks_have_their_own_environment(launcher: Launcher) -> None:
    """Variables of one rank are not those of the next one, nor of this process; an empty one is
    there; the working folder and the arguments are those of the call."""
    code = (
        "import json, os, sys; names = 'FRAME_FIRST', 'FRAME_SECOND', 'FRAME_EMPTY'; "
        "print(json.dumps([[os.environ.get(name) for name in names], os.getcwd(), sys.argv[1:]]), file=sys.stderr, flush=True)"
    )
    arguments, place = ["a b", "", "c=d\te", "ü"], launcher.place().ranks[0]
    cases = (({"FRAME_FIRST": "1"}, ["1", None, None]), ({"FRAME_SECOND": "2=\n", "FRAME_EMPTY": ""}, [None, "2=\n", ""]))
    for variables, expected in cases:
        process = launcher.start(place, [*python_command("-c", code), *arguments], variables, pipes_errors=True)
        try:
            values, folder, received = json.loads(_line(process))
        finally:
            _end(process)
        assert values == expected, f"a rank started with {variables} has the values {values}: a start must not keep those of another rank"
        assert folder == str(Path.cwd()), f"a rank has the working folder {folder}, and not that of its parent"
        assert received[: len(arguments)] == arguments, f"a command with the arguments {arguments} gets {received}"
    left = [name for name in os.environ if name.startswith(("FRAME_FIRST", "FRAME_SECOND", "FRAME_EMPTY"))]
    assert not left, f"the variables of a rank must not change this process, which has {left}"


def check_the_folder_is_left_alone(launcher: Launcher) -> None:
    """The engine's sockets and files are in the folder, too."""
    folder = launcher.context.folder
    (folder / "of-the-engine").write_text("kept")
    (folder / "of-the-engine.d").mkdir()
    for _ in range(2):
        with _started(launcher, "pass") as process:
            _exit_code(process)
    assert (folder / "of-the-engine").read_text() == "kept" and (folder / "of-the-engine.d").is_dir(), "a start removes files of the engine"


def check_many_rendezvous_differ(launcher: Launcher) -> None:
    addresses = []
    for _ in range(8):
        addresses.append(launcher.place().rendezvous)
        address = urlsplit(addresses[-1])
        if address.scheme == "file":
            return  # `check_the_rendezvous_is_new` has looked at it
    count = len(set(addresses))
    assert count >= 7, f"8 starts have {count} different addresses: ranks of an earlier start may still listen there"


def check_errors_that_are_not_piped(launcher: Launcher) -> None:
    """A rank that writes 300 KB to standard error goes on, since no one reads a pipe."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # the rank inherits it
    try:
        code = "import sys; sys.stderr.write('x' * 300_000); sys.stderr.flush(); sys.exit(4)"
        process = launcher.start(launcher.place().ranks[0], python_command("-c", code), {}, pipes_errors=False)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
    try:
        assert process.stderr is None, "standard error must be no pipe if pipes_errors is false"
        assert _exit_code(process) == 4, "a rank whose errors are not piped must not wait for a reader of them"
    finally:
        _end(process)


def check_input_reaches_the_rank(launcher: Launcher) -> None:
    with _started(launcher, "import sys; print(sys.stdin.readline().strip()[::-1], file=sys.stderr, flush=True)") as process:
        assert process.stdin is not None, "a rank's input must be a pipe"
        process.stdin.write(b"configuration\n")
        process.stdin.flush()
        assert _line(process) == "noitarugifnoc", "what is written to stdin must reach the rank"


def check_the_end_of_input_is_seen(launcher: Launcher) -> None:
    with _started(launcher, "import sys; sys.stdin.read(); sys.exit(9)") as process:
        assert process.stdin is not None
        process.stdin.close()
        assert _exit_code(process) == 9, "a rank must see the end of its input"


def check_exit_codes_are_reported(launcher: Launcher) -> None:
    for code in (0, 7, 78):
        with _started(launcher, f"import sys; sys.exit({code})") as process:
            assert _exit_code(process) == code and process.poll() == code, "poll and wait must give the rank's exit code"


def check_a_running_rank_is_running(launcher: Launcher) -> None:
    with _started(launcher, "import sys; sys.stdin.read()") as process:
        began = time.monotonic()
        assert process.poll() is None, "poll must give None while the rank runs"
        assert time.monotonic() - began < 1, "poll must return at once"
        require_fast(process.poll, _MAX_POLL_SECONDS, "poll(), which the server's event loop calls,")
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            return
        raise AssertionError("wait must raise subprocess.TimeoutExpired while the rank runs")


def check_killed_ranks_end(launcher: Launcher) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', file=sys.stderr, flush=True); sys.stdin.read()"
    with _started(launcher, code) as process:
        _line(process)
        process.kill()
        ended = _exit_code(process)
        assert ended not in (None, 0), "kill must end a rank, also one that ignores SIGTERM"
        assert ended == process.poll() == -signal.SIGKILL, f"the exit code of a killed rank is {ended}, not -{int(signal.SIGKILL)}"


def check_signals_reach_the_rank(launcher: Launcher) -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5));"
        "print('up', file=sys.stderr, flush=True); sys.stdin.read()"
    )
    with _started(launcher, code) as process:
        _line(process)
        process.send_signal(signal.SIGUSR1)
        assert _exit_code(process) == 5, "send_signal must reach the rank, which writes its stacks at SIGUSR1"


def check_ranks_are_separate(launcher: Launcher) -> None:
    places = launcher.place().ranks
    command = python_command("-c", "import sys; sys.stdin.read()")
    processes = [launcher.start(place, command, {}, pipes_errors=True) for place in places]
    try:
        assert len({process.pid for process in processes}) == len(places), "each rank has a process of its own"
        processes[-1].kill()
        processes[-1].wait(_PATIENCE)
        assert all(process.poll() is None for process in processes[:-1]), "the end of one rank must not end the others"
    finally:
        for process in processes:
            _end(process)


def check_signals_are_blocked_at_the_start(launcher: Launcher) -> None:
    """These three alone, beside those that the caller blocks."""
    code = "import signal, sys; print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))), file=sys.stderr, flush=True)"
    own = signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR2})
    try:
        with _started(launcher, code) as process:
            blocked = json.loads(_line(process))
    finally:
        after = signal.pthread_sigmask(signal.SIG_SETMASK, own)
    assert {*_BLOCKED} <= {*blocked}, "SIGINT, SIGTERM and SIGHUP must be blocked"
    further = {*blocked} - {*_BLOCKED, signal.SIGUSR2}
    assert not further, f"the signals {further} are blocked too, and a rank does not unblock them: they stop none of its processes"
    assert after == {signal.SIGUSR2}, "start must not change the signal mask of the caller: set the former one again"


def check_ranks_are_ordinary_processes(launcher: Launcher) -> None:
    """A rank ignores no signal that its parent handles, and its files are its user's."""
    numbers = [int(each) for each in (*_BLOCKED, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)]
    code = (
        f"import json, os, signal, sys; ignored = [each for each in {numbers} if signal.getsignal(each) == signal.SIG_IGN]; "
        "print(json.dumps([ignored, os.umask(0)]), file=sys.stderr, flush=True)"
    )
    umask, variables = os.umask(0o027), {"FRAME_GIVEN": "1"}
    try:
        with _started(launcher, code, environment=variables) as process:
            ignored, umask_of_rank = json.loads(_line(process))
        assert os.umask(0o027) == 0o027, "start must not change the umask of the caller"
    finally:
        os.umask(umask)
    further = [each for each in ignored if signal.getsignal(each) != signal.SIG_IGN]
    assert not further, f"a rank ignores the signals {further}, which its parent does not: they do not stop it"
    assert umask_of_rank & 0o022 == 0o022, f"a rank has the umask {umask_of_rank:03o}: others may change its files"
    assert variables == {"FRAME_GIVEN": "1"}, "start must not change the variables that it is called with"


def check_ranks_hold_no_input_of_others(launcher: Launcher) -> None:
    """A rank ends with its own input, also while ranks run that were started later."""
    place, command = launcher.place().ranks[0], python_command("-c", "import sys; sys.stdin.read(); sys.exit(9)")
    first, second = (launcher.start(place, command, {}, pipes_errors=True) for _ in range(2))
    try:
        assert first.stdin is not None
        first.stdin.close()
        ended = _exit_code(first)
        assert ended == 9, "a rank does not see the end of its input while another rank runs, which has inherited the pipe: close it there"
        assert second.poll() is None, "the end of one rank's input must not end another rank"
    finally:
        _end(first)
        _end(second)


def check_a_missing_program_is_an_error(launcher: Launcher) -> None:
    """An OSError says what is missing; a rank that ends would be started again."""
    with contextlib.suppress(OSError):
        process = launcher.start(launcher.place().ranks[0], ["/nonexistent/program"], {}, pipes_errors=True)
        _end(process)
        raise AssertionError("the start of a command that does not exist must raise OSError")


def check_ranks_start_again(launcher: Launcher) -> None:
    for _ in range(2):
        with _started(launcher, "import sys; sys.stdin.read()", rank=launcher.context.size - 1) as process:
            assert process.poll() is None, "ranks must start again after their end"


def _exit_code(process: RankProcess) -> int | None:
    try:
        return process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        return None
