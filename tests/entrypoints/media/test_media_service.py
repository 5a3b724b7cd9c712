"""The service over real processes: files that crash, take memory or time, or are refused; sharing,
limits, cancellation, and no file left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from frame.entrypoints.media import media_pool, media_service
from frame.entrypoints.media.media_pool import FatalFileError, MediaPool
from frame.entrypoints.media.media_process import Job, select_options
from frame.entrypoints.media.media_service import MediaInputError, MediaPart, MediaService, PreparedMedia, make_digest
from frame.media.files import map_arrays
from tests.entrypoints.media.served import make_hostile


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MediaService]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "features").mkdir()
    resolved = make_hostile(folder / "model", decode_timeout=0.5, processes=2, limits={"image": 8}, process_memory=256 << 20)
    made = MediaService(resolved, folder / "features")
    await made.start()
    yield made
    await made.close()
    assert not list((folder / "features").iterdir())
    assert not [child for child in psutil.Process().children(recursive=True) if "media_process" in " ".join(child.cmdline())]


pytestmark = pytest.mark.asyncio(loop_scope="module")


def part(data: bytes, number: int = 0, **options: object) -> MediaPart:
    return MediaPart("image", data, f"messages[0].content[{number}]", options)


async def refusal(service: MediaService, *parts: MediaPart, owner: str = "me") -> MediaInputError:
    with pytest.raises(MediaInputError) as caught:
        await service.prepare(parts, owner)
    return caught.value


async def drain(service: MediaService) -> None:
    """Wait until no file is held."""
    async with asyncio.timeout(30):
        while service._held:  # noqa: ASYNC110 - the service has no event
            await asyncio.sleep(0.01)


def arrays(item: PreparedMedia) -> dict[str, np.ndarray]:
    return map_arrays(item.path, item.arrays)


async def test_items_come_in_order_and_leave_no_file(service: MediaService) -> None:
    items = await service.prepare([part(data) for data in (b"one", b"two", b"three")], "me")
    assert [bytes(arrays(item)["rows"]) for item in items] == [b"one", b"two", b"three"]
    assert [item.layout.expansion for item in items] == ["<row>" * 3, "<row>" * 3, "<row>" * 5]
    assert {(item.placeholder, item.row_token) for item in items} == {("<image>", "<row>")}
    assert service.placeholders() == {"image": "<image>"}
    service.release(items)
    await asyncio.sleep(0)
    assert not any(os.path.exists(item.path) for item in items)  # noqa: ASYNC240, PTH110 - of a test


async def test_equal_files_of_an_owner_are_prepared_once(service: MediaService) -> None:
    first, second = await service.prepare([part(b"same"), part(b"same")], "me")
    (other,) = await service.prepare([part(b"same")], "you")
    (changed,) = await service.prepare([part(b"same", detail="low")], "me")
    assert first.path == second.path
    assert len({first.path, other.path, changed.path}) == 3
    assert first.digest == other.digest != changed.digest
    service.release([first])
    assert os.path.exists(second.path)  # noqa: ASYNC240, PTH110 - of a test
    service.release([second, other, changed])
    await asyncio.sleep(0)
    assert not os.path.exists(first.path)  # noqa: ASYNC240, PTH110 - of a test


async def test_a_file_that_ends_two_processes_is_refused(service: MediaService) -> None:
    before = service.pool.num_deaths
    assert "damaged" in (await refusal(service, part(b"crash"))).sentence
    assert service.pool.num_deaths == before + 2
    error = await refusal(service, part(b"crash", 3))  # at once
    assert (service.pool.num_deaths, error.param) == (before + 2, "messages[0].content[3]")
    service.release(await service.prepare([part(b"well")], "me"))


async def test_a_process_that_ends_while_it_writes_leaves_no_file(service: MediaService) -> None:
    """The fixture looks for files at the end, too."""
    await drain(service)
    assert "damaged" in (await refusal(service, part(b"write"))).sentence
    assert not list(Path(service.pool._setup.folder).iterdir())  # noqa: ASYNC240 - of a test


async def test_a_file_that_ends_one_process_is_tried_again(service: MediaService, tmp_path: Path) -> None:
    before = service.pool.num_deaths
    service.release(await service.prepare([part(b"once:" + os.fsencode(tmp_path / "seen"))], "me"))
    assert service.pool.num_deaths == before + 1


@pytest.mark.parametrize("data", [b"spin", b"sleep"])
async def test_time_is_limited(service: MediaService, data: bytes) -> None:
    assert "time" in (await refusal(service, part(data))).sentence


async def test_memory_is_limited(service: MediaService) -> None:
    assert "memory" in (await refusal(service, part(b"memory"))).sentence


async def test_messages_of_decoders_stay_in_the_log(service: MediaService) -> None:
    assert "secret" not in (await refusal(service, part(b"fail"))).sentence
    assert (await refusal(service, part(b"refuse", 2))).sentence == "the file is refused; send another"


async def test_processes_have_no_socket_and_low_priority(service: MediaService) -> None:
    (item,) = await service.prepare([part(b"descriptors")], "me")
    assert arrays(item)["nice"][0] >= 10
    service.release([item])


async def test_kills_from_outside_disturb_no_request(service: MediaService) -> None:
    for number in range(10):
        (item,) = await service.prepare([part(b"pid%d" % number)], "me")
        os.kill(int(arrays(item)["pid"][0]), signal.SIGKILL)
        service.release([item])


async def test_the_number_of_parts_is_limited(service: MediaService, monkeypatch: pytest.MonkeyPatch) -> None:
    error = await refusal(service, *(part(b"x", number) for number in range(9)))
    assert (error.param, "--limit-mm-per-prompt" in error.sentence) == ("messages[0].content[8]", True)
    error = await refusal(service, MediaPart("video", b"x", "here"))
    assert "video" in error.sentence and "image" in error.sentence
    monkeypatch.setattr(media_service, "MAX_OWNER_PARTS", 3)
    waiting = asyncio.create_task(service.prepare([part(b"a"), part(b"b")], "me"))
    await asyncio.sleep(0)
    assert (await refusal(service, part(b"c"), part(b"d"))).is_busy
    service.release(await service.prepare([part(b"c"), part(b"d")], "you"))
    service.release(await waiting)


async def test_a_cancelled_request_leaves_nothing(service: MediaService, tmp_path: Path) -> None:
    tasks = [asyncio.create_task(service.prepare([part(b"cancel%d" % number)], f"owner{number % 3}")) for number in range(20)]
    for turns, task in enumerate(tasks):
        for _ in range(turns % 4):
            await asyncio.sleep(0)
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    for items in done:
        if isinstance(items, list):
            service.release(items)
    service.release(await service.prepare([part(b"after")], "me"))
    await drain(service)


async def test_one_refused_part_releases_the_others(service: MediaService) -> None:
    await refusal(service, part(b"fine"), part(b"refuse"))
    await drain(service)


async def test_digests_depend_on_bytes_and_options() -> None:
    texts = [(b"a", b"b"), (b"ab", b""), (b"b", b"a"), (b"a", b"b", b"c")]
    assert len({make_digest(b"data", *each) for each in texts} | {make_digest(b"datab", b"a", b"")}) == 5


async def test_the_pool_alone(service: MediaService) -> None:
    assert isinstance(service.pool, MediaPool)
    with pytest.raises(FatalFileError):
        await service.pool.decode(Job("image", b"crash", {}))
    decoded = await service.pool.decode(Job("image", b"well", {}))
    os.unlink(decoded.path)  # noqa: PTH108 - of a test


async def test_a_start_that_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_pool, "START_SECONDS", 0.1)
    pool = MediaPool(make_hostile(tmp_path / "model", processes=1), tmp_path, (sys.executable, "-S", "-c", "import time; time.sleep(600)"))
    with pytest.raises(RuntimeError, match=r"did not start within 0\.1 s"):
        await pool.start()


async def test_options_go_to_their_modality() -> None:
    options = {"max_pixels": 1, "video": {"fps": 2}}
    assert [select_options(options, name) for name in ("image", "video", "audio")] == [{"max_pixels": 1}, {"fps": 2}, {}]
