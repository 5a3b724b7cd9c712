"""The tier `disk`: damaged files, restarts, kills, several processes, foreign files, permissions,
and disks that are full or read-only."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from frame.core.errors import ConfigurationError
from frame.host.interpreter import child_environment
from frame.plugins.kv_tiers import block_files
from frame.plugins.kv_tiers.threaded_tier import BlockError
from frame.testing.kv_tier.rig import Rig, make_keys
from tests.plugins.kv_tiers.tier_rig import make_disk, wait_for_index

ROOT = Path(__file__).parents[3]
HEADER = 96  # bytes before the block


@contextmanager
def disk(folder: Path, num_blocks: int = 16, identity: str = "model") -> Iterator[Rig]:
    rig = make_disk(folder, num_blocks, identity)
    try:
        yield rig
    finally:
        rig.tier.close()


def files(folder: Path) -> dict[str, Path]:
    """By the name without its ending, which is the key."""
    return {path.stem: path for path in folder.rglob("*.kv")}


def fail(rig: Rig, keys: list[bytes]) -> str:
    """Load blocks of which the first fails. -> the error."""
    job, _ = rig.begin_load(keys)
    result = rig.wait_for([job])[job]
    rig.tier.finish(job)
    assert result.num_blocks == 0
    return result.error


@pytest.mark.parametrize("position", [0, 8, 39, 40, 71, 72, 80, 95, HEADER, HEADER + 4095])
def test_a_flipped_bit_in_any_part_of_a_file_fails_the_load(tmp_path: Path, position: int) -> None:
    with disk(tmp_path / "tier") as rig:
        keys = make_keys(2)
        rig.store(keys)
        path = files(tmp_path)[keys[0].hex()]
        data = bytearray(path.read_bytes())
        assert len(data) == HEADER + rig.block_bytes
        data[position] ^= 1
        path.write_bytes(data)
        assert "has changed" in fail(rig, keys)
        assert rig.tier.match(keys) == 0, "the block that failed is not matched again"
        rig.load_all(keys[1:])
        rig.store(keys)
        rig.load_all(keys)


def test_a_short_a_missing_and_a_replaced_file_fail(tmp_path: Path) -> None:
    with disk(tmp_path / "tier") as rig:
        keys = make_keys(4)
        rig.store(keys)
        paths = [files(tmp_path)[key.hex()] for key in keys]
        os.truncate(paths[0], 100)
        paths[1].unlink()
        paths[2].unlink()
        paths[2].symlink_to(paths[3])
        assert "another size" in fail(rig, keys[:1])
        assert "missing" in fail(rig, keys[1:2])
        assert "cannot read" in fail(rig, keys[2:3])
        rig.load_all(keys[3:])


def test_a_fifo_in_place_of_a_file_fails_and_blocks_no_thread(tmp_path: Path) -> None:
    with disk(tmp_path / "tier") as rig:
        keys = make_keys(16)
        rig.store(keys)
        paths = [files(tmp_path)[key.hex()] for key in keys]
        for path in paths[:-1]:
            path.unlink()
            os.mkfifo(path)
        for key in keys[:-1]:
            assert "another size" in fail(rig, [key])
        rig.load_all(keys[-1:])


def test_blocks_and_their_order_of_use_survive_a_restart(tmp_path: Path) -> None:
    keys = make_keys(6)
    with disk(tmp_path / "tier") as rig:
        rig.store(keys)
    for age, key in enumerate(keys):  # the first is the oldest
        os.utime(files(tmp_path)[key.hex()], (1e9 + age, 1e9 + age))
    with disk(tmp_path / "tier", num_blocks=4) as rig:  # with a smaller quota
        wait_for_index(rig, keys, 4)
        assert rig.count_held(keys[2:]) == 4
        rig.wait_until(lambda: len(files(tmp_path)) == 4, "old files are not removed")
        rig.load_all(keys[2:3])
        rig.store(make_keys(3, "new"))
        assert [rig.tier.match([key]) for key in keys[2:]] == [1, 0, 0, 0], "what was loaded last stays"


def test_an_idle_server_finds_its_blocks_after_a_restart(tmp_path: Path) -> None:
    """Its engine polls no tier before the first request looks its blocks up."""
    keys = make_keys(6)
    with disk(tmp_path / "tier") as rig:
        rig.store(keys)
    with disk(tmp_path / "tier") as rig:
        end = time.monotonic() + 30
        while rig.tier.match(keys) < len(keys) and time.monotonic() < end:
            time.sleep(0.01)
        assert rig.tier.match(keys) == len(keys)


def test_another_identity_has_other_blocks(tmp_path: Path) -> None:
    keys = make_keys(3)
    with disk(tmp_path / "tier") as one, disk(tmp_path / "tier", identity="other") as other:
        one.store(keys)
        other.store(keys[:1])
        assert len(list((tmp_path / "tier").iterdir())) == 2
        ours, theirs = (path for folder in (tmp_path / "tier").iterdir() for path in folder.glob(f"{keys[0].hex()}.kv"))
        contents = [path.read_bytes() for path in (theirs, ours)]
        for path, data in zip((ours, theirs), contents, strict=True):
            path.write_bytes(data)
        assert one.load(keys[:1]) == other.load(keys[:1]) == 0, "a file of another identity is served"
        assert one.tier.match(keys[1:]) == 2


CHILD = """
import sys
from pathlib import Path
from frame.testing.kv_tier.rig import make_keys
from tests.plugins.kv_tiers.tier_rig import make_disk
folder, seed, count = sys.argv[1:]
rig = make_disk(Path(folder), 64, block_bytes=1 << 18)
keys = make_keys(int(count), seed)
print("ready", flush=True)
while True:
    for start in range(0, len(keys), 4):
        rig.store(keys[start : start + 4])
        rig.load(keys[start : start + 4])
        print("stored", flush=True)
"""


def start(folder: Path, seed: str, count: int) -> subprocess.Popen[str]:
    environment = child_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"})
    command = [sys.executable, "-c", CHILD, str(folder), seed, str(count)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_kill_leaves_whole_blocks_and_processes_share_a_folder(tmp_path: Path) -> None:
    """Two processes store and evict the same keys in one folder until both are killed."""
    children = [start(tmp_path / "tier", "shared", 200) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            for _ in range(20):
                assert child.stdout.readline() == "stored\n"
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    keys = make_keys(200, "shared")
    rig = make_disk(tmp_path / "tier", 200, block_bytes=1 << 18)
    try:
        whole = [key for key in keys if key.hex() in files(tmp_path)]
        assert len(whole) >= 40
        wait_for_index(rig, keys, len(whole))
        for key in whole:
            rig.load_all([key])
    finally:
        rig.tier.close()


def test_foreign_files_are_ignored_and_stay(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    keys = make_keys(20)
    with disk(folder, 4) as rig:
        rig.store(keys[:2])
    place = next(folder.iterdir())
    old, new = (f".{keys[0].hex()}.{digit * 16}.tmp" for digit in "01")
    foreign = ["README", f"{keys[3].hex()}.kv.bak", f"{keys[3].hex().upper()}.kv", "ab.kv", f".{keys[3].hex()}.tmp", old, new]
    for name in foreign:
        (place / name).write_text("mine")
    (place / f"{keys[4].hex()}.kv").mkdir()
    (place / f"{keys[5].hex()}.kv").write_text("another size")
    os.utime(place / old, (1e9, 1e9))  # left over from a process that was killed
    with disk(folder, 4) as rig:
        wait_for_index(rig, keys, 2)
        for key in keys[6:]:
            rig.store([key])
        rig.wait_until(lambda: not (place / old).exists(), "what a killed process has left is not removed")
    for name in set(foreign) - {old}:
        assert (place / name).read_text() == "mine"
    assert (place / f"{keys[4].hex()}.kv").is_dir()


def test_the_folder_is_private(tmp_path: Path) -> None:
    with disk(tmp_path / "new" / "tier") as rig:
        rig.store(make_keys(1))
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "new" / "tier").rglob("*")} == {"0o700", "0o600"}
    for mode in (0o720, 0o702, 0o777):
        (tmp_path / "new" / "tier").chmod(mode)
        with pytest.raises(ConfigurationError, match="chmod 700"):
            make_disk(tmp_path / "new" / "tier")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="name another folder"):
        make_disk(tmp_path / "file")


def test_a_link_in_place_of_the_blocks_of_a_model_is_refused(tmp_path: Path) -> None:
    with disk(tmp_path / "tier"):
        (blocks,) = (tmp_path / "tier").iterdir()
    blocks.rename(tmp_path / "elsewhere")
    blocks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="does not follow the symbolic link"):
        make_disk(tmp_path / "tier")


def test_cleared_blocks_leave_the_disk(tmp_path: Path) -> None:
    with disk(tmp_path / "tier") as rig:
        keys = make_keys(8)
        rig.store(keys)
        load, loaded = rig.begin_load(keys[:2])
        rig.tier.clear()
        assert rig.tier.match(keys) == 2
        results = rig.wait_for([load])
        rig.compare(keys[:2], loaded, results[load])
        rig.tier.finish(load)
        rig.wait_until(lambda: len(files(tmp_path / "tier")) == 2, "cleared files are left")
        rig.tier.clear()
        rig.wait_until(lambda: not files(tmp_path / "tier"), "cleared files are left")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        make_disk(tmp_path / "tier")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_fails_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A write stops in the middle of a block, as it does on a disk that is full."""
    write, keys = os.write, make_keys(6)

    def fail_late(descriptor: int, data: memoryview) -> int:
        if len(data) < 3000:
            raise OSError(code, os.strerror(code))
        return write(descriptor, data[:2000])

    with disk(tmp_path / "tier") as rig:
        rig.store(keys[:2])
        with monkeypatch.context() as patch:
            patch.setattr(block_files.os, "write", lambda one, data: write(one, data) if len(data) == HEADER else fail_late(one, data))
            job, _ = rig.begin_store(keys)
            rig.tier.finish(job)
            result = rig.wait_for([job])[job]
        held = 1 if code == errno.ENOSPC else 2  # a full disk gets room
        wait_for_removals(rig)
        assert (result.num_blocks, rig.tier.match(keys)) == (2, held)
        assert os.strerror(code) in result.error
        assert len(list((tmp_path / "tier").rglob("*.*"))) == held, "no piece of a block is left"
        rig.load_all(keys[:held])
        rig.store(keys)
        rig.load_all(keys)


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_on_a_full_disk_new_blocks_take_the_place_of_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The disk has room for four blocks, and the quota for 16. Other errors remove nothing."""
    write = block_files._write_file

    def write_some(path: Path, pieces: Any) -> None:
        if len(files(tmp_path)) >= 4:
            raise OSError(code, os.strerror(code))
        write(path, pieces)

    monkeypatch.setattr(block_files, "_write_file", write_some)
    with disk(tmp_path / "tier") as rig:
        old, new = make_keys(4), make_keys(6)[4:]
        rig.store(old)
        for _ in range(3):
            job, _ = rig.begin_store(new)
            rig.tier.finish(job)
            rig.wait_for([job])
            wait_for_removals(rig)
        if code == errno.ENOSPC:
            assert (rig.tier.match(new), rig.tier.match(old)) == (2, 2)
            rig.load_all([*new, *old[:2]])
        else:
            assert (rig.tier.match(new), rig.tier.match(old)) == (0, 4)


def wait_for_removals(rig: Rig) -> None:
    deadline = time.monotonic() + 10
    while rig.tier._removing:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_limit_of_the_system_on_files_fails_stores(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stops a write within a block, in a process of its own."""
    script = """
import resource, sys
from pathlib import Path
from frame.testing.kv_tier.rig import make_keys
from tests.plugins.kv_tiers.tier_rig import make_disk
rig, keys = make_disk(Path(sys.argv[1]), block_bytes=1 << 16), make_keys(2)
rig.store(keys[:1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, resource.RLIM_INFINITY))
job, _ = rig.begin_store(keys)
rig.tier.finish(job)
result = rig.wait_for([job])[job]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert (result.num_blocks, len(list(Path(sys.argv[1]).rglob("*.*")))) == (1, 1), result
rig.store(keys)
rig.load_all(keys)
rig.tier.close()
print(result.error)
"""
    environment = child_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"})
    command = [sys.executable, "-c", script, str(tmp_path / "tier")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout


def test_sizes_without_a_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="size_gib of kv_tier/disk of .* holds no block of"):
        make_disk(tmp_path / "tier", num_blocks=0, block_bytes=1 << 20)


def test_close_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, keys = make_disk(tmp_path / "tier"), make_keys(8)
    rig.store(keys)
    released, read = threading.Event(), list[bool]()
    monkeypatch.setattr(block_files.os, "readv", lambda *_: read.append(released.wait(20)) or 0)
    job, _ = rig.begin_load(keys)
    rig.tier.finish(job)
    rig.tier.close()
    assert read == []
    released.set()


def test_no_more_is_matched_than_can_be_loaded(tmp_path: Path) -> None:
    with disk(tmp_path / "tier", num_blocks=8) as rig:
        keys = make_keys(8)
        for key in keys:
            rig.store([key])
        count = rig.tier.match(keys)
        assert 0 < count < 8
        rig.load_all(keys[:count])
        rig.load_all(keys[count : 2 * count])


def test_a_deleted_folder_is_made_again_by_threads_at_once(tmp_path: Path) -> None:
    blocks = block_files.BlockFiles(tmp_path / "a/tier", "model", 16)
    shutil.rmtree(tmp_path / "a")
    keys, errors, start = make_keys(8), list[Exception](), threading.Barrier(8)

    def write(key: bytes) -> None:
        start.wait(20)
        try:
            blocks.write_block(key, memoryview(bytes(16)))
        except BlockError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert set(files(tmp_path)) == {key.hex() for key in keys}
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a/tier", blocks.path)] == [0o700, 0o700]


def test_a_link_in_place_of_the_deleted_folder_is_not_followed(tmp_path: Path) -> None:
    blocks = block_files.BlockFiles(tmp_path / "tier", "model", 16)
    blocks.path.rmdir()
    blocks.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BlockError, match="cannot use the folder"):
        blocks.write_block(make_keys(1)[0], memoryview(bytes(16)))
    assert not (tmp_path / "elsewhere").exists()
