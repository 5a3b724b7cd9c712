"""`AdapterSpool`: a private folder with copies of adapters' two files, which engines read.
`AdapterVersion`: the bytes of one, and which requests use them, each as an `AdapterUse`.

An adapter is copied while it is hashed, so what was checked is what an engine reads, whatever
happens to the original. Used by the registry of servers and by the offline engine, in threads. Must
not know a request or HTTP.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol

import msgspec

from frame.host.folder_lock import lock_folder
from frame.host.host_memory import measure_host_memory
from frame.host.interpreter import child_environment, python_command
from frame.interfaces.adapter import AdapterError

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "frame-adapters-"
PIECE = 1024 * 1024  # bytes that are copied at a time; hashing them releases the interpreter's lock
MAX_CONFIG = 1024 * 1024  # bytes
MAX_HEADER = 16 * 1024 * 1024  # bytes of the header of adapter_model.safetensors
MAX_TENSORS = 100_000  # a rank for each expert of the largest models
MAX_TOKENIZER = 64 * 1024 * 1024  # bytes of a file of the tokenizer
LABEL_DIGITS = 12  # of a digest, in the header that names a version
STALE_AFTER = 60.0  # seconds; a folder that is just being made has no lock yet
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block the open
# Programs of their own for large files, because parsing these holds the interpreter's lock.
SMALL_HEADER = 256 * 1024  # bytes of one that is parsed here
_CHECK = f"""
import sys
from pathlib import Path
from {__name__} import AdapterError, check_header
try:
    check_header(Path(sys.argv[1]))
except AdapterError as error:
    sys.exit(str(error))
"""
_COMPARE = """
import json, sys
first, second = ({k: v for k, v in json.load(open(path, "rb")).items() if k not in ("truncation", "padding")} for path in sys.argv[1:])
sys.exit(first != second)
"""


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] | None = None


_header_decoder = msgspec.json.Decoder(dict[str, _Tensor])


@dataclass(frozen=True, slots=True)
class SpooledAdapter:
    """A copy. `digest`: SHA-256 of both files."""

    digest: str
    folder: Path
    size: int  # bytes


class AdapterSpool:
    """`tokenizer`: the base model's folder with tokenizer files; None: it has none. The folder is
    made at first use; those that killed processes left are removed then. Thread-safe."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else Path(tokenizer)
        self._path: Path | None = None
        self._remove: weakref.finalize[..., AdapterSpool] | None = None  # also at the exit of this process
        self._guard = threading.Lock()
        self._is_closed = False  # which ends copies
        self._holders: Counter[str] = Counter()  # of each copy, by digest

    def copy_folder(self, path: str, roots: Sequence[str] | None = None) -> SpooledAdapter:
        """Copy the adapter in a folder; the caller gives the copy back with `remove`. `roots`:
        folders that it must be in, and then no link is followed; None: any folder. Raises
        AdapterError."""
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(_opened(path, roots))
                self._check_names(folder, follows=roots is None)
                upload = stack.enter_context(self.open_upload())
                for name in (CONFIG, TENSORS):
                    with _open_file(folder, name, follows=roots is None) as source:
                        before = _identity(source)
                        if name == TENSORS:
                            _check_size(os.fstat(source.fileno()).st_size)
                        while piece := source.read(PIECE):
                            if self._is_closed:
                                raise AdapterError("the server stops")
                            upload.write(name, piece)
                        if _identity(source) != before:
                            raise AdapterError(f"{name} was written to while it was read; load the adapter when it is complete")
                return upload.finish()
            except FileNotFoundError:
                raise AdapterError(f"there is no folder {path!r} that this server may read; name one with {CONFIG} and {TENSORS}") from None
            except OSError as error:
                raise AdapterError(f"the adapter cannot be copied: {error.strerror}") from error

    @contextmanager
    def open_upload(self) -> Iterator[AdapterUpload]:
        """What writes a new adapter into the spool; removed unless it was finished."""
        folder = Path(tempfile.mkdtemp(dir=self._folder()))
        try:
            with ExitStack() as files:
                handles = {name: files.enter_context((folder / name).open("wb", 0)) for name in (CONFIG, TENSORS)}
                yield AdapterUpload(folder, handles, self._keep)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, folder: Path, digest: str) -> Path:
        """Where the finished copy is from now on."""
        with self._guard:
            self._holders[digest] += 1
            if self._holders[digest] == 1:
                folder.rename(folder.with_name(digest))
            return folder.with_name(digest)

    def remove(self, adapter: SpooledAdapter) -> None:
        """Give a copy back, which is deleted unless the same bytes were copied again."""
        with self._guard:
            self._holders[adapter.digest] -= 1
            if self._holders[adapter.digest] < 1:
                del self._holders[adapter.digest]
                shutil.rmtree(adapter.folder, ignore_errors=True)

    def close(self) -> None:
        """Delete the folder. A second call does nothing."""
        self._is_closed = True
        if self._remove is not None:
            self._remove()

    def _folder(self) -> Path:
        with self._guard:
            if self._path is None:
                path = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
                _remove_stale(path.parent, path.stat().st_mtime - STALE_AFTER)
                self._remove = weakref.finalize(self, _remove_locked, path, lock_folder(path))
                self._path = path
            return self._path

    def _check_names(self, folder: int, follows: bool) -> None:
        """Raise AdapterError for a pickle, and for a tokenizer or chat template of its own."""
        names = set(os.listdir(folder))
        if TENSORS not in names and PICKLE in names:
            remedy = "save it again with model.save_pretrained(folder, safe_serialization=True)"
            raise AdapterError(f"{PICKLE} is a pickle, which may run code when it is read; {remedy}")
        for name in (CONFIG, TENSORS):
            if name not in names:
                raise AdapterError(f"the folder has no {name}; name the folder that PEFT's save_pretrained wrote")
        base = self._tokenizer
        if base is None:
            return
        if "tokenizer.json" in names and (base / "tokenizer.json").is_file():
            content = _read_whole(folder, "tokenizer.json", MAX_TOKENIZER, follows)
            if content != (base / "tokenizer.json").read_bytes() and not self._is_same_json(content, base / "tokenizer.json"):
                raise AdapterError("tokenizer.json differs from the base model's; adapters with tokens of their own are not served")
        template = _template(lambda name: _read_whole(folder, name, MAX_TOKENIZER, follows) if name in names else None)
        if template is not None and template != _template(lambda name: path.read_bytes() if (path := base / name).is_file() else None):
            raise AdapterError("the adapter's chat template differs from the base model's; remove it, or serve the merged checkpoint")

    def _is_same_json(self, content: bytes, other: Path) -> bool:
        """Whether two tokenizers differ in the layout of their files and in padding alone."""
        with tempfile.NamedTemporaryFile(dir=self._folder()) as file:
            file.write(content)
            file.flush()
            return _run(_COMPARE, Path(file.name), other).returncode == 0


class AdapterUpload:
    """A copy that is being written. Its methods run in threads, one at a time."""

    def __init__(self, folder: Path, files: Mapping[str, IO[bytes]], keep: Callable[[Path, str], Path]) -> None:
        self._folder = folder
        self._keep = keep
        self._files = files
        self._tensors_hash = hashlib.sha256()
        self._config = bytearray()
        self._size = 0

    def write(self, name: str, piece: bytes) -> None:
        """Append to CONFIG or TENSORS. Raises AdapterError, OSError."""
        if name == CONFIG:
            self._config += piece
            if len(self._config) > MAX_CONFIG:
                raise AdapterError(f"{CONFIG} is larger than {MAX_CONFIG} bytes")
        else:
            self._tensors_hash.update(piece)
        self._size += len(piece)
        rest = memoryview(piece)
        while rest:
            rest = rest[self._files[name].write(rest) :]

    def finish(self) -> SpooledAdapter:
        """Check both files. Raises AdapterError, OSError."""
        for file in self._files.values():
            file.close()
        try:
            is_object = isinstance(json.loads(self._config), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise AdapterError(f"{CONFIG} is not a JSON object; send the file that PEFT wrote")
        path = self._folder / TENSORS
        with path.open("rb") as file:
            is_small = int.from_bytes(file.read(8), "little") <= SMALL_HEADER
        if is_small:
            check_header(path)
        elif (done := _run(_CHECK, path)).returncode:
            raise AdapterError(done.stderr.strip().rpartition("\n")[2])
        digest = hashlib.sha256(hashlib.sha256(self._config).digest() + self._tensors_hash.digest()).hexdigest()
        return SpooledAdapter(digest, self._keep(self._folder, digest), self._size)


def check_header(path: Path) -> None:
    """Raise AdapterError unless the header of a safetensors file is valid and its tensors are in
    the file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise AdapterError(f"{TENSORS} is cut off, or is no safetensors file")
        if length > MAX_HEADER:
            raise AdapterError(f"the header of {TENSORS} has {length} bytes; it may have {MAX_HEADER}")
        header = file.read(length)
    if header.count(b'"data_offsets"') > MAX_TENSORS:  # counted first, because decoding holds the interpreter's lock
        raise AdapterError(f"{TENSORS} has more than {MAX_TENSORS} tensors")
    try:
        tensors = _header_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise AdapterError(f"the header of {TENSORS} is not valid; save the adapter again") from None
    tensors.pop("__metadata__", None)
    if not tensors:
        raise AdapterError(f"{TENSORS} has no tensors; save the adapter again")
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets or (-1, -1)
        if not 0 <= begin <= end <= size - 8 - length:
            raise AdapterError(f"the tensor {name[:200]!r} is not inside {TENSORS}; the file is cut off or was changed")


def _check_size(size: int) -> None:
    """Raise AdapterError for a file that host memory, which holds its tensors, cannot take."""
    if size > (available := measure_host_memory()[1]):
        raise AdapterError(f"{TENSORS} has {size:,} bytes, and {available:,} bytes of host memory are available; free some")


def _run(program: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    command = [*python_command("-c", program), *map(str, paths)]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)


# files --------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: str, roots: Sequence[str] | None) -> Iterator[int]:
    """The descriptor of a folder; with `roots`, of one below these, reached without links. Raises
    AdapterError, OSError."""
    flags = _READ | os.O_DIRECTORY
    if roots is None:
        descriptor = os.open(path, flags)
    else:
        root, parts = _below(path, roots)
        descriptor = os.open(root, flags)
        for part in parts:
            above = descriptor
            try:
                descriptor = os.open(part, flags | os.O_NOFOLLOW, dir_fd=above)
            except NotADirectoryError:
                raise FileNotFoundError from None  # a file, or a link: their difference is not the client's to know
            finally:
                os.close(above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _below(path: str, roots: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """The root that a path is in, and the folders between them. Raises AdapterError."""
    pure = PurePosixPath(path)
    if ".." not in pure.parts and "\0" not in path:
        for root in map(Path, map(os.path.abspath, roots)):
            if pure.is_absolute() and pure.is_relative_to(root):
                return root, pure.relative_to(root).parts
            if not pure.is_absolute() and (root / pure).is_dir():
                return root, pure.parts
    raise AdapterError(f"there is no folder {path[:200]!r} that this server may read; name one below adapters.folders")


def _open_file(folder: int, name: str, follows: bool) -> IO[bytes]:
    """A regular file of a folder. Raises AdapterError, OSError."""
    flags = _READ if follows else _READ | os.O_NOFOLLOW
    try:
        file = open(name, "rb", 0, opener=lambda name, _: os.open(name, flags, dir_fd=folder))  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise AdapterError(f"{name} cannot be read ({error.strerror}); it must be a file of the folder, and no link") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise AdapterError(f"{name} is no regular file")
    return file


def _read_whole(folder: int, name: str, maximum: int, follows: bool) -> bytes:
    with _open_file(folder, name, follows) as file:
        content = bytearray()
        while piece := file.read(PIECE):
            content += piece
            if len(content) > maximum:
                raise AdapterError(f"{name} is larger than {maximum} bytes")
        return bytes(content)


def _template(read: Any) -> str | None:
    """A folder's chat template, by `read` of a file's name. Raises AdapterError."""
    try:
        if (text := read("chat_template.jinja")) is not None:
            return str(text.decode()).strip()
        config = json.loads(read("tokenizer_config.json") or "{}")
    except (ValueError, RecursionError):
        raise AdapterError("tokenizer_config.json or chat_template.jinja of the adapter is not valid; remove it") from None
    template = config.get("chat_template") if isinstance(config, dict) else None
    return template.strip() if isinstance(template, str) else None if template is None else json.dumps(template)


def _identity(file: IO[bytes]) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _remove_stale(base: Path, before: float) -> None:
    """Delete spools of this user in `base` that no process has locked, and that were last changed
    `before` this time."""
    for path in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and status.st_mtime < before:
                _remove_locked(path, lock_folder(path))


def _remove_locked(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One digest. It stays while a name or a request has it."""

    files: SpooledAdapter
    on_release: Callable[[AdapterVersion], None]  # called when the last request has ended
    num_names: int = 0
    num_users: int = 0  # sequences, and requests that are being started
    holders: set[object] = field(default_factory=set)  # clients whose engines have it in host memory
    is_leaving: bool = False  # new requests wait until it has given its room to another one
    info: dict[str, Any] = field(default_factory=dict)  # what the engine says of it: rank, pages, bytes

    @property
    def digest(self) -> str:
        return self.files.digest

    def acquire(self) -> None:
        """Count one more user, for whom it stays in host memory."""
        self.num_users += 1

    def release(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self.on_release(self)


@dataclass(slots=True)
class AdapterCounts:
    """Counts of sequences and their output tokens, by label."""

    running: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


class AdapterUse(NamedTuple):
    """A version under the name that a request gave. `label`: the name in the metrics."""

    name: str
    version: AdapterVersion
    label: str
    counts: AdapterCounts

    def __str__(self) -> str:
        """What a response says of it."""
        return f"{self.name}@{self.version.digest[:LABEL_DIGITS]}"

    def start(self) -> None:
        """A sequence uses it."""
        self.counts.running[self.label] += 1
        self.version.acquire()

    def end(self, num_tokens: int) -> None:
        """A sequence that used it has ended, with so many output tokens."""
        self.counts.running[self.label] -= 1
        self.counts.tokens[self.label] += num_tokens
        self.version.release()


class AdapterRecovery(Protocol):
    """What an `EngineClient` tells of its engine, so that a new one gets the adapters again."""

    def record_loss(self, client: Any) -> None: ...

    def begin_recovery(self, client: Any) -> bool: ...

    def restore(self, client: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A name, and the version that new requests get by it. `owner`: the tenant whose requests may
    use it; "": all."""

    name: str
    owner: str
    created: int  # seconds since the epoch
    version: AdapterVersion
    folder: str = ""  # that it came from; "": a body
