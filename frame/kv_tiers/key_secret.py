"""The secret that keys of blocks are derived from: without it neither a key nor the
name of a file tells which text a block belongs to.

Used where an engine is built. Must not know a tier.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from frame.core.errors import ConfigurationError

SECRET_BYTES = 32
FILE = "key_secret"
# a link or a pipe, which another user may have made, is not followed or waited for
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def make_secret() -> bytes:
    """The secret of a process whose blocks end with it."""
    return secrets.token_bytes(SECRET_BYTES)


def read_secret(folder: Path) -> bytes:
    """The secret of the blocks in a folder, which the first server writes, with mode 0600. Raises
    ConfigurationError for a file or a folder that cannot be used."""
    path = folder / FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        with os.fdopen(os.open(path, _READ), "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(SECRET_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except FileExistsError as error:
        raise ConfigurationError(f"the folder of KV cache blocks {folder} is a file; name a folder") from error
    except OSError as error:
        raise ConfigurationError(f"the secret of KV cache blocks {path} cannot be used ({error.strerror}); change folder") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"{path} is not a file; remove it")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(f"{path} holds a secret, and other users may use it; remove the folder, or give the file the mode 0600")
    if len(secret) != SECRET_BYTES:
        raise ConfigurationError(f"{path} holds {len(secret)} bytes, and a secret has {SECRET_BYTES}; remove it and the blocks beside it")
    return secret


def _create(path: Path) -> None:
    """Several servers may start at once: the first complete file stays."""
    temporary = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(make_secret())
            opened.flush()
            os.fsync(opened.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
