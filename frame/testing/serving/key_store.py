"""The conformance suite of key stores: known keys, keys that are nearly known, many at once, and
what a store keeps of them. Must not know a key store by name.

`make_conformance_store(folder, keys)`, a static method of the class, returns the context and the
options of a store for a place with these keys (key -> it is an operator's). Without the method, the
options must lead to a place that knows `KEYS`. `list_broken_conformance_stores(folder)`, another
one, yields contexts and options of places that cannot be used, each with words of the error.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from frame.core.errors import ConfigurationError
from frame.host.interpreter import child_environment, python_command
from frame.interfaces.keys import KeyHolder, KeyStore, KeyStoreCapabilities, KeyStoreContext
from frame.testing.conformance import Check, SkipCheck, Subject, call_check, count_elements, find_checks, unchanged_process
from frame.testing.serving.http_extension import measure_pause

_LONG_KEYS = [f"{length}".ljust(length, "w") for length in (64, 72, 255, 256, 4096)]  # where hashes cut keys
# key -> it is an operator's. Some are equal in their first 8, 16, 64, 200 and 2,000 characters.
KEYS: Mapping[str, bool] = MappingProxyType(
    {
        "frame-conformance-alice": False,
        "frame-conformance-bob": False,
        "frame-conformance-operator": True,
        **{f"{'k' * length}-{number}": False for length in (8, 16, 64, 200, 2000) for number in (1, 2)},
        **dict.fromkeys(_LONG_KEYS, False),
    }
)
USERS = [key for key, is_operator in KEYS.items() if not is_operator]
OTHER = {"frame-conformance-carol": False}  # of another place
NEARLY = (
    b"", b" ", b"frame", b"frame-conformance-alic", b"frame-conformance-alice ", b" frame-conformance-alice", b"frame-conformance-alice\n",
    b"Frame-conformance-alice", b"frame-conformance-alice\x00", b"frame-conformance-alice,frame-conformance-bob", b"frame-conformance-*",
    b"k" * 8, b"k" * 200 + b"-", b"k" * 8192, b"\xff\xfe", b"\x00", "frame-conformance-alíce".encode(), b"' OR '1'='1", b"../keys", b"%00",
    b"frame-conformance-alice\xff", b"\xc3frame-conformance-bob", b"frame-conformance-alice\x00tail", b"k" * 72, b"k" * 64 + b"-12",
    *(changed.encode() for key in _LONG_KEYS for changed in (f"{key}w", key * 2, key[:-1], f"{key[:-1]}v")),
    b"None", b"null", b"0", b"true", b"*", b"Bearer frame-conformance-alice", b"sha256:frame-conformance-alice",
)  # fmt: skip
NUM_UNKNOWN = 600  # keys, after which a store holds no more than after half of them
MAX_LOOKUP = 1.8e-3  # seconds; for the fastest of some lookups
MAX_PAUSE = 0.05  # seconds for which a lookup may hold the event loop
TIMEOUT = 60.0
# Makes a store with some keys in a process of its own, and prints their tenants.
PRINT_TENANTS = """
import asyncio, importlib, importlib.util, json, pathlib, sys
name, file, attribute, folder, keys = sys.argv[1:6]
try:
    module = importlib.import_module(name)
except ImportError:
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
target, keys = getattr(module, attribute), json.loads(keys)
context, options = target.make_conformance_store(pathlib.Path(folder), keys)
async def work():
    store = target(context, options)
    tenants = [(await store.find_holder(key.encode())).tenant for key in keys]
    await store.close()
    return tenants
print(json.dumps(asyncio.run(work())))
"""

Make = Callable[..., KeyStore]


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `key_store`."""
    can = subject.record.capabilities
    has_operators = isinstance(can, KeyStoreCapabilities) and can.has_operators
    place: Any = getattr(subject.target, "make_conformance_store", None)
    folders: list[tempfile.TemporaryDirectory[str]] = []  # removed with the suite

    def make(keys: Mapping[str, bool] = KEYS) -> KeyStore:
        context, options = KeyStoreContext(), subject.options
        if place is not None:
            folders.append(tempfile.TemporaryDirectory(prefix="frame-keys-"))
            context, options = place(Path(folders[-1].name), dict(keys))
        elif keys is not KEYS:
            raise SkipCheck("the class has no make_conformance_store(folder, keys), so the suite has one place alone")
        store: KeyStore = subject.target(context, options)
        return store

    return (Check(name, partial(call_check, check, make, has_operators, seconds=TIMEOUT)) for name, check in find_checks(__name__))


def run(work: Any) -> Any:
    """The result of a coroutine in an event loop of its own."""
    return asyncio.run(asyncio.wait_for(work, TIMEOUT))


async def find(store: KeyStore, key: str | bytes) -> KeyHolder | None:
    """The holder, after a look at its form."""
    holder = await store.find_holder(key.encode() if isinstance(key, str) else key)
    assert holder is None or isinstance(holder, KeyHolder), f"find_holder returned {holder!r}; return a KeyHolder or None"
    return holder


async def find_known(store: KeyStore, key: str) -> KeyHolder:
    holder = await find(store, key)
    if holder is None:
        raise AssertionError(
            f"the key {key[:40]!r} of its place has no holder; give the class a static method make_conformance_store(folder, keys), or "
            "options of a place that knows frame.testing.serving.key_store.KEYS"
        )
    return holder


async def check_known_keys_have_holders(make: Make, has_operators: bool) -> None:
    """Each key has a tenant of its own, the same when it is sent again and after a restart."""
    first, second = make(), make()
    tenants = {key: (await find_known(first, key)).tenant for key in KEYS}
    assert len(set(tenants.values())) == len(KEYS), "two keys have one tenant, so that each sees what is stored for the other"
    for store in (first, second):
        for key in reversed([*KEYS]):
            assert (await find_known(store, key)).tenant == tenants[key], "a key has another tenant when it is sent again"
    await first.close()
    await second.close()


def check_tenants_are_the_same_in_each_process(make: Make, has_operators: bool) -> None:
    """A store of a process of its own, with other hashes of texts, gives each key the tenant that
    it has here. Stored responses belong to it."""
    target: Any = make().__class__
    module = sys.modules.get(target.__module__)
    name: str = target.__qualname__
    is_known = getattr(module, name, None) is target
    if not hasattr(target, "make_conformance_store") or not is_known:
        raise SkipCheck("a class without make_conformance_store, or in no module, is not made in a process of its own")

    async def work() -> list[str]:
        store = make()
        tenants = [(await find_known(store, key)).tenant for key in KEYS]
        await store.close()
        return tenants

    expected = run(work())
    with tempfile.TemporaryDirectory() as folder:
        arguments = (target.__module__, str(getattr(module, "__file__", "")), name, folder, json.dumps(dict(KEYS)))
        environment = {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "PYTHONHASHSEED": "7"}
        command = python_command("-c", PRINT_TENANTS, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=child_environment(environment))
    assert done.returncode == 0, f"the store fails in a process of its own: {(done.stderr.splitlines() or ['?'])[-1]}"
    assert json.loads(done.stdout.splitlines()[-1]) == expected, "a key has another tenant in another process"


async def check_unknown_keys_have_none(make: Make, has_operators: bool) -> None:
    """Parts of known keys, keys with a space, in capitals, empty, not text: none opens the server,
    and none is an error."""
    store = make()
    for _ in range(2):
        for key in NEARLY:
            holder = await find(store, key)
            assert holder is None, f"the key {key[:40]!r}, which is none of its place, has the tenant {holder.tenant}"
        await find_known(store, USERS[0])
    await store.close()


async def check_operators(make: Make, has_operators: bool) -> None:
    """Only operators' keys open operators' routes."""
    store = make()
    for key, is_operator in KEYS.items():
        holder = await find_known(store, key)
        may = holder.is_operator
        assert may is (is_operator and has_operators), f"the key {key[:40]!r} {'opens' if may else 'does not open'} operators' routes"
    await store.close()


async def check_tenants_reveal_no_key(make: Make, has_operators: bool) -> None:
    """Names of tenants are in logs and metrics."""
    store = make()
    for key in KEYS:
        tenant = (await find_known(store, key)).tenant
        part = next((key[at : at + 6] for at in range(len(key) - 5) if key[at : at + 6] in tenant), None)
        assert part is None, f"the tenant {tenant} has the characters {part!r} of its key"
    await store.close()


async def check_keys_are_not_kept(make: Make, has_operators: bool) -> None:
    """The store holds digests: a dump of its memory has no key."""
    store = make()
    for key in KEYS:
        await find_known(store, key)
    kept = _find_texts(store, {*KEYS, *(key.encode() for key in KEYS)})
    assert not kept, f"the store keeps the key {kept!r:.60}; keep a digest"
    await store.close()


def _find_texts(store: object, texts: set[Any], maximum: int = 20_000) -> Any:
    """One of the texts among what an object and its class refer to; None: none is."""
    waiting: list[Any] = [vars(store) if hasattr(store, "__dict__") else store, *(dict(vars(kind)) for kind in type(store).__mro__[:-1])]
    seen: set[int] = set()
    while waiting and len(seen) < maximum:
        one = waiting.pop()
        if id(one) in seen or inspect.ismodule(one) or inspect.isclass(one) or inspect.isroutine(one) or inspect.iscode(one):
            continue
        seen.add(id(one))
        if isinstance(one, (str, bytes)):
            if any(type(text) is type(one) and text in one for text in texts):  # type: ignore[operator]  # a file's text has several
                return one
        else:
            waiting += gc.get_referents(one)
    return None


async def check_keys_at_once(make: Make, has_operators: bool) -> None:
    """Two hundred requests with known and unknown keys run at once, and each has its own answer."""
    store = make()
    expected = {key: await find_known(store, key) for key in KEYS}
    fresh = make()
    for each in (store, fresh):
        sent = [(USERS[n % len(USERS)] if n % 3 else f"unknown-{n % 7}") for n in range(200)]
        results = await asyncio.gather(*(find(each, key) for key in sent))
        for key, holder in zip(sent, results, strict=True):
            assert holder == expected.get(key), f"of 200 lookups at once, that of {key[:30]!r} returned {holder}"
    await store.close()
    await fresh.close()


async def check_clients_that_leave(make: Make, has_operators: bool) -> None:
    """Lookups that are cancelled end none of others with the same key."""
    store = make()
    for delay in (0.0, 0.001, 0.01):
        for key in (USERS[0], "unknown"):
            tasks = [asyncio.create_task(find(store, key)) for _ in range(6)]
            await asyncio.sleep(delay)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            wrong = [each for each in results[1::2] if isinstance(each, BaseException)]
            assert not wrong, f"a lookup fails when another one with the same key is cancelled: {wrong[0]!r}"
            assert all((each is not None) is (key == USERS[0]) for each in results[1::2]), "a lookup beside a cancelled one is wrong"
    await store.close()


async def check_places_are_apart(make: Make, has_operators: bool) -> None:
    """Two stores in one process know the keys of their own places alone, whichever is asked first;
    a key that is gone after a reload is not accepted."""
    first, second = make(), make(OTHER)
    for _ in range(2):
        for store, keys, others in ((first, KEYS, OTHER), (second, OTHER, KEYS)):
            for key in others:
                assert await find(store, key) is None, "a store accepts the key of another store's place"
            for key in keys:
                await find_known(store, key)
    await first.close()
    await find_known(second, next(iter(OTHER)))
    await second.close()


def check_lookups_do_not_hold_the_event_loop(make: Make, has_operators: bool) -> None:
    """Other requests run while a key is looked up: no lookup holds the loop for 50 ms."""

    async def work() -> float:
        store = make()

        async def look_up() -> None:
            for number in range(20):
                await find(store, USERS[number % len(USERS)])
                await find(store, f"unknown {number}")

        await find(store, "first")  # what a store does once
        max_pause = await measure_pause(look_up)
        await store.close()
        return max_pause

    pauses = []
    for _ in range(5):  # a machine that is busy for a moment is no fault of the store
        pauses.append(run(work()))
        if pauses[-1] < MAX_PAUSE:
            return
    raise AssertionError(f"a lookup holds the event loop for {min(pauses) * 1000:.0f} ms; await what takes time")


async def check_a_place_without_keys(make: Make, has_operators: bool) -> None:
    """It refuses all keys, or cannot be used."""
    try:
        store = make({})
    except ConfigurationError:
        return
    for key in (b"", b"any", USERS[0].encode()):
        assert await find(store, key) is None, f"a store without keys accepts {key!r:.40}"
    await store.close()


def check_broken_places_are_refused(make: Make, has_operators: bool) -> None:
    """A place that cannot be used is an error at the start, in one sentence that says what is
    wrong. A store that took it would refuse all clients, or accept wrong ones."""
    target: Any = make().__class__
    broken = getattr(target, "list_broken_conformance_stores", None)
    if broken is None:
        raise SkipCheck("the class has no list_broken_conformance_stores(folder): errors about its place are not checked")
    with tempfile.TemporaryDirectory(prefix="frame-keys-") as folder:
        for context, options, words in broken(Path(folder)):
            try:
                target(context, options)
            except ConfigurationError as error:
                assert words in str(error) and "\n" not in str(error), f"the error does not say {words!r} in one line: {error!s:.300}"
                continue
            raise AssertionError(f"a place of which the error must say {words!r} is taken")


def check_lookups_are_fast(make: Make, has_operators: bool) -> None:
    """The event loop stands still for little more than a digest takes, among 10,000 keys as among
    30."""

    async def measure(store: KeyStore, keys: list[str]) -> float:
        best = min([await measure_pause(partial(find, store, keys[number % len(keys)])) for number in range(20)])
        await store.close()
        return best

    pauses = []
    for count in (30, 10_000):
        keys = {f"frame-conformance-{number}": False for number in range(count)}
        pauses.append(run(measure(make(keys), [*keys])))
    assert pauses[0] < MAX_LOOKUP, f"each lookup holds the event loop for {pauses[0] * 1e3:.1f} ms"
    assert pauses[1] < max(MAX_LOOKUP, 10 * pauses[0]), f"among 10,000 keys, a lookup holds the event loop for {pauses[1] * 1e3:.1f} ms"


async def check_memory_is_bounded(make: Make, has_operators: bool) -> None:
    """Of clients that try one key after the other, a store remembers no more than a bound."""
    store, sizes = make(), []
    await find_known(store, USERS[0])
    for number in range(0, NUM_UNKNOWN, 50):
        results = await asyncio.gather(*(find(store, f"attempt-{number + n}") for n in range(50)))
        assert not any(results), "an unknown key has a holder"
        if number + 50 in (NUM_UNKNOWN // 2, NUM_UNKNOWN):
            sizes.append(count_elements(store))
    await store.close()
    assert sizes[1] <= sizes[0] + NUM_UNKNOWN // 3, (
        f"it holds {sizes[0]} objects after {NUM_UNKNOWN // 2} unknown keys, and {sizes[1]} after {NUM_UNKNOWN}"
    )


async def check_number_of_tenants(make: Make, has_operators: bool) -> None:
    """The server's places are divided by it."""
    store = make()
    count = store.count_tenants()
    assert isinstance(count, int) and not isinstance(count, bool) and count >= 2, (
        f"count_tenants() is {count!r} for a place with {len(KEYS)} keys; with less than 2, one tenant may take all places of the server"
    )
    await store.close()


def check_process_and_close(make: Make, has_operators: bool) -> None:
    """A store may be closed twice, while lookups run, and leaves the process as it was. A lookup
    that runs then ends with the holder or with an error, which is none of the client's."""

    async def work() -> None:
        store = make()
        await find_known(store, USERS[0])
        running = [asyncio.create_task(find(store, key)) for key in ("one", "two", USERS[1])]
        await asyncio.sleep(0)
        await store.close()
        await store.close()
        for result in await asyncio.gather(*running, return_exceptions=True):
            assert not isinstance(result, KeyHolder) or result.tenant, "a lookup that a close ended has a holder without a tenant"
        assert running[2].exception() or running[2].result(), "a known key is refused because its store was closed during the lookup"

    with unchanged_process("a key store changed"):
        run(work())
