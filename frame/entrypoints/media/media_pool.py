"""`MediaPool`: the media processes, seen from an event loop.

Used by `MediaService`, which gives no more jobs at once than there are processes. A process that
dies is replaced, and its file is tried once more. Must not know a request or a format.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from frame.config.resolved import Resolved
from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.media.media_process import MODULE, WALL_FACTOR, Decoded, Died, Job, Ready, Refused, Request, Response, Setup
from frame.host.interpreter import child_environment, python_command
from frame.interfaces.modality import MediaError

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # timeout for loading a processor
GRACE = 5.0  # seconds after which a process that does not end its own child counts as hung
PAUSE = 1.0  # seconds between two failed starts
MAX_BLAME = 4  # of a file: two for a process that ends itself, or hangs; one for one that another program kills
MAX_RESPONSE = 64 << 20  # bytes
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


class MediaPool:
    """The processes that decode files. folder: of the features. command: replaces the program."""

    def __init__(self, resolved: Resolved, folder: Path, command: Sequence[str] | None = None) -> None:
        media = resolved.user.media
        public = resolved.user.model_copy(update={"server": ServerSection(max_process_memory=resolved.user.server.max_process_memory)})
        config = resolved.model_copy(update={"user": public}).model_dump_json().encode()
        self._setup = Setup(config, str(folder))
        self._command = command or python_command("-m", MODULE)
        self._seconds = WALL_FACTOR * media.decode_timeout + GRACE
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        if resolved.media is None:
            raise ValueError("the configuration has no media")
        self.num_processes = media.processes or resolved.media.processes
        self._workers = [_Worker(self._command, self._setup) for _ in range(self.num_processes)]
        self._replacements: set[asyncio.Task[None]] = set()
        self.tokens: dict[str, tuple[str, str]] = {}  # by modality: placeholder and row token
        self.num_deaths = 0
        self._closed = False

    async def start(self) -> None:
        """Start all processes. Raises ConfigurationError for a checkpoint that they cannot read,
        RuntimeError if they do not start."""
        try:
            self.tokens = (await asyncio.gather(*(worker.start() for worker in self._workers)))[0]
        except BaseException:
            await self.close()
            raise
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End all processes. Files that are being decoded are refused."""
        self._closed = True
        for task in self._replacements:
            task.cancel()
        await asyncio.gather(*self._replacements, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._workers))
        for worker in self._workers:
            self._idle.put_nowait(worker)  # wakes who waits for one

    async def decode(self, job: Job) -> Decoded:
        """Decode a file. Raises MediaError for one that is refused, or that ends two processes."""
        message, blame = msgspec.msgpack.encode(job), 0
        while blame < MAX_BLAME:
            worker = await self._idle.get()
            if self._closed:
                self._idle.put_nowait(worker)
                raise MediaError("the server is stopping; try again later")
            if not worker.is_alive:  # it ended without a file
                self._put_back(worker)
                continue
            try:
                response = await worker.ask(message, self._seconds)
            finally:
                self._put_back(worker)
            if isinstance(response, Refused):
                raise MediaError(response.sentence)
            if isinstance(response, Decoded):
                return response
            code = response.code if isinstance(response, Died) else await worker.end()
            blame += 1 if code == -signal.SIGKILL else MAX_BLAME // 2
            self.num_deaths += 1
            log.warning("a media process ended (%d) while it decoded a file of %d bytes (%s)", code, len(job.data), job.modality)
        raise FatalFileError("the file is damaged, or takes too much memory or time to decode; send a smaller one, or another format")

    def _put_back(self, worker: _Worker) -> None:
        if worker.is_alive or self._closed:
            self._idle.put_nowait(worker)
            return
        task = asyncio.create_task(self._replace(worker))
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)

    async def _replace(self, worker: _Worker) -> None:
        while True:
            await worker.end()
            try:
                await worker.start()
            except (RuntimeError, ConfigurationError, OSError) as error:
                log.error("a media process does not start: %s", error)
                await asyncio.sleep(PAUSE)
            else:
                self._idle.put_nowait(worker)
                return


class FatalFileError(MediaError):
    """The file has ended two processes."""


class _Worker:
    """One process, and its successors."""

    def __init__(self, command: Sequence[str], setup: Setup) -> None:
        self._command = command
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._is_lost = False  # it did not respond
        self._is_late = False  # it did not respond in time

    @property
    def is_alive(self) -> bool:
        process = self._process
        return not self._is_lost and process is not None and process.returncode is None and not (process.stdout and process.stdout.at_eof())

    async def start(self) -> dict[str, tuple[str, str]]:
        """Start the process. -> `Ready.tokens`."""
        self._is_lost = self._is_late = False
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(_ENVIRONMENT),
        )
        response = await self.ask(msgspec.msgpack.encode(self._setup), START_SECONDS)
        if isinstance(response, Refused):
            raise ConfigurationError(response.sentence)
        if self._is_late:  # it has logged no cause
            raise RuntimeError(f"a media process did not start within {START_SECONDS:g} s; lower media.processes, or the machine's load")
        if not isinstance(response, Ready):
            raise RuntimeError("a media process failed to start; the cause is in the log")
        return response.tokens

    async def ask(self, message: bytes, seconds: float) -> Response | None:
        """The response; None if the process ends, hangs or is cancelled, and has then ended."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        writer, reader = self._process.stdin, self._process.stdout
        try:
            async with asyncio.timeout(seconds):
                writer.write(len(message).to_bytes(4, "little"))
                writer.write(message)
                await writer.drain()
                size = int.from_bytes(await reader.readexactly(4), "little")
                if size <= MAX_RESPONSE:
                    return _decoder.decode(await reader.readexactly(size))
        except TimeoutError:
            self._is_late = True
            self._kill()
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError):
            pass
        except BaseException:
            self._kill()
            raise
        self._is_lost = True
        return None

    async def end(self) -> int:
        """End the process and wait for it. -> its exit code."""
        if self._process is None:
            return 0
        with contextlib.suppress(TimeoutError):  # its pipe closes shortly before it exits
            await asyncio.wait_for(self._process.wait(), 0.0 if self.is_alive else 0.5)
        self._kill()
        code = await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(OSError):
            await self._process.stdin.wait_closed()
        return code

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


_decoder: msgspec.msgpack.Decoder[Response] = msgspec.msgpack.Decoder(Response)
__all__ = ["FatalFileError", "MediaPool", "Request"]
