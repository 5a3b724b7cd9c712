"""A process that decodes clients' files, one at a time, within limits of memory, time and
descriptors.

`main` is the process, run as a module with the server's process id; `MediaPool` is the other side.
It loads the plugins, and decodes in a copy of itself, which a bad file may end. A message is its
length (4 bytes, little endian) and MessagePack: first `Setup`, to which the process responds with
`Ready` or `Refused`, and then `Job`s. Features go into files; messages hold paths. Must not know a
request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from frame.config.resolved import Resolved
from frame.core.blame import describe
from frame.core.errors import ConfigurationError
from frame.core.interfaces.media import FeatureArray
from frame.entrypoints.processes.grammar_process import MemoryLimit, read_message, write_message
from frame.host.child_process import die_with_parent, open_replies
from frame.interfaces.modality import MediaError, MediaLayout, MediaLimits, Modality, ModalityCapabilities, ModalityContext
from frame.media.files import remove_unfinished, write_features
from frame.plugins.registry import Registry

log = logging.getLogger(__name__)

MODULE = "frame.entrypoints.media.media_process"  # this one
NICENESS = 10  # below the engine and the grammar processes
MAX_FILES = 64  # descriptors
WALL_FACTOR = 2  # seconds of the clock for each of the CPU that a file may take
EXIT_SECONDS = 0.5  # that a child has to exit once its pipe is closed
MAX_FEATURES = 4 << 30  # bytes of a file of features


class Setup(msgspec.Struct, array_like=True, tag=True):
    """The first message. config: `Resolved` as JSON, without secrets. folder: of the features."""

    config: bytes
    folder: str


class Job(msgspec.Struct, array_like=True, tag=True):
    """A file to decode."""

    modality: str
    data: bytes
    options: dict[str, Any]


class Ready(msgspec.Struct, array_like=True, tag=True):
    """By modality, its placeholder and its row token."""

    tokens: dict[str, tuple[str, str]]


class Decoded(msgspec.Struct, array_like=True, tag=True):
    """A file that was decoded. seconds: that it took, of the CPU."""

    layout: MediaLayout
    path: str
    arrays: list[FeatureArray]
    seconds: float
    retires: bool = False  # the process ends: a decoder keeps memory


class Refused(msgspec.Struct, array_like=True, tag=True):
    """One sentence, for the client or, of `Setup`, for the operator."""

    sentence: str
    retires: bool = False


class Died(msgspec.Struct, array_like=True, tag=True):
    """The file has ended the process that decoded it. code: its exit code, or the negative number
    of the signal."""

    code: int


Request = Setup | Job
Response = Ready | Decoded | Refused | Died


def load_modalities(resolved: Resolved, registry: Registry) -> dict[str, Modality]:
    """The chosen plugins by what a part of a request says. Where the user names none and gives them
    no options, those that do not read the checkpoint are left out with a warning. Raises
    ConfigurationError."""
    media = resolved.user.media
    is_open = media.enabled is None and media.modalities is None
    limits = MediaLimits(max_pixels=media.max_pixels, max_seconds=media.max_seconds)
    built = {}
    for choice in resolved.plugins.get("modality", ()):
        can = registry.get("modality", choice.name).capabilities
        modality = can.modality if isinstance(can, ModalityCapabilities) else choice.name
        context = ModalityContext(Path(resolved.model_path), resolved.model, limits, select_options(media.processor_options, modality))
        try:
            built[modality] = registry.create(choice, context)
        except ConfigurationError as error:
            if not is_open or context.processor_options:
                raise
            log.warning("%s parts are not read: %s", modality, error)
    return built


def select_options(options: Mapping[str, Any], modality: str) -> Mapping[str, Any]:
    """Those of one modality: the keys `video` and `audio` hold theirs, others are of images."""
    if modality != "image":
        chosen: Mapping[str, Any] = options.get(modality, {})
        return chosen
    return {name: value for name, value in options.items() if name not in ("video", "audio")}


def decode(modalities: Mapping[str, Modality], job: Job, folder: Path) -> Decoded | Refused:
    """The response to a job."""
    began = time.process_time()
    modality = modalities[job.modality]
    try:
        size = modality.read_size(job.data)
        layout = modality.lay_out(size, job.options)
        path, arrays = write_features(folder, modality.compute_features(job.data, size, job.options))
    except MediaError as error:
        return Refused(str(error))
    except MemoryError:
        return _refuse_memory()
    except OSError:
        log.exception("features are not written")
        return Refused("the server has no room for the file now; try again later")
    except Exception as error:  # of a plugin or a decoder, whose message is not the client's
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # torch's form of a MemoryError
            return _refuse_memory()
        log.exception("%s fails on a file", describe(modality))
        return Refused("the file cannot be decoded; send it in another format")
    return Decoded(layout, path, arrays, time.process_time() - began)


def _refuse_memory() -> Refused:
    return Refused("the file takes too much memory to decode; send a smaller one")


def main(load: Callable[[Resolved, Registry], Mapping[str, Modality]] = load_modalities) -> None:
    """Give messages to a child until standard input closes, and its responses back."""
    from frame.plugins.loader import load_configured

    replies = open_replies(int(sys.argv[1]))
    if (message := read_message(0)) is None:
        return
    setup = _read_request(message)
    assert isinstance(setup, Setup)
    resolved = Resolved.model_validate_json(setup.config)
    try:
        modalities = load(resolved, load_configured(resolved.user.plugins))
    except ConfigurationError as error:
        write_message(replies, _encode(Refused(str(error))))
        return
    write_message(replies, _encode(Ready({name: (each.placeholder, each.row_token) for name, each in modalities.items()})))
    os.nice(NICENESS)  # from here on: a start that waits for this process loses nothing
    seconds = WALL_FACTOR * resolved.user.media.decode_timeout
    child = _Child.fork(resolved, modalities, Path(setup.folder), (0, replies))
    while (message := read_message(0)) is not None:
        response = child.ask(message, seconds)
        write_message(replies, response)
        if child.has_ended:
            child = _Child.fork(resolved, modalities, Path(setup.folder), (0, replies))


class _Child:
    """A copy of this process, made in milliseconds, that has the limits and decodes. This process
    itself reads no file of a client."""

    def __init__(self, pid: int, messages: int, responses: int, folder: Path) -> None:
        self._pid, self._messages, self._responses, self._folder = pid, messages, responses, folder
        self.has_ended = False

    @classmethod
    def fork(cls, resolved: Resolved, modalities: Mapping[str, Modality], folder: Path, others: tuple[int, ...]) -> _Child:
        """others: descriptors that the child does not get."""
        (messages, to_child), (from_child, responses) = os.pipe(), os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(messages)
            os.close(responses)
            return cls(pid, to_child, from_child, folder)
        code = 1
        try:
            die_with_parent(parent)
            for handle in (*others, to_child, from_child):
                os.close(handle)
            _decode_all(resolved, modalities, folder, messages, responses)
            code = 0
        finally:
            os._exit(code)

    def ask(self, message: bytes, seconds: float) -> bytes:
        """The response, or `Died`."""
        response = None
        with contextlib.suppress(BrokenPipeError):
            write_message(self._messages, message)
            response = read_message(self._responses, seconds)
        if response is None:
            return _encode(Died(self._end()))
        if _read_response(response).retires:
            self._end()
        return response

    def _end(self) -> int:
        """End the child. -> its exit code, or the negative number of the signal that ended it."""
        self.has_ended = True
        os.close(self._messages)
        until = time.monotonic() + EXIT_SECONDS
        while (ended := os.waitpid(self._pid, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.01)
        has_hung = ended[0] == 0
        if has_hung:
            os.kill(self._pid, signal.SIGKILL)
            ended = os.waitpid(self._pid, 0)
        os.close(self._responses)
        remove_unfinished(self._folder, self._pid)
        return -signal.SIGPROF if has_hung else os.waitstatus_to_exitcode(ended[1])


def _decode_all(resolved: Resolved, modalities: Mapping[str, Modality], folder: Path, messages: int, responses: int) -> None:
    """The child: decode files until the pipe closes, or memory is not given back."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    memory = _limit(resolved)
    while (message := read_message(messages)) is not None:
        job = _read_request(message)
        assert isinstance(job, Job)
        signal.setitimer(signal.ITIMER_PROF, resolved.user.media.decode_timeout)
        response = decode(modalities, job, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del message, job
        response.retires = bool(memory.measure_retained())
        write_message(responses, _encode(response))
        if response.retires:
            return


def _limit(resolved: Resolved) -> MemoryLimit:
    """Limit this process to what it holds now, and what one file may take."""
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, MAX_FILES), (resource.RLIMIT_FSIZE, MAX_FEATURES)):
        resource.setrlimit(kind, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing more is an OSError
    memory = MemoryLimit(resolved.user.media.process_memory, resolved.user.server.max_process_memory)
    memory.limit()
    return memory


_encode = msgspec.msgpack.Encoder().encode
_read_request = msgspec.msgpack.Decoder(Request).decode
_read_response = msgspec.msgpack.Decoder(Decoded | Refused).decode

if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # finalizing the interpreter takes seconds once torch is loaded
