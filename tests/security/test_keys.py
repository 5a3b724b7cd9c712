"""API keys: only health checks answer without one, and each key has its own prefix cache."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from frame.config.schema import FrameConfig
from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.http.protocol.api_route import Access
from frame.entrypoints.keys import KeyAccess, check_exposure, tenant_of
from frame.interfaces.keys import KeyHolder, KeyStore, KeyStoreContext, KeyStoreError
from frame.plugins.key_stores.file import FileKeyStore
from tests.entrypoints.inprocess import serving
from tests.entrypoints.published import ROUTES

PROMPT = list(range(3, 100))


def access(*keys: str, tmp_path: Path) -> KeyAccess:
    file = tmp_path / "ring"
    file.write_text("\n".join(keys))
    return KeyAccess(lambda: FileKeyStore(KeyStoreContext(api_keys=str(file))))


async def tenant(keys: KeyAccess, headers: list[tuple[bytes, bytes]]) -> str | None:
    holder = await keys.find_holder(headers)
    assert holder is None or not holder.is_operator
    return holder and holder.tenant


async def test_both_headers_and_several_keys(tmp_path: Path) -> None:
    keys = access("one", "two", tmp_path=tmp_path)
    one, two = await tenant(keys, [(b"authorization", b"Bearer one")]), await tenant(keys, [(b"x-api-key", b"two")])
    assert one is not None and two is not None and one != two
    assert await tenant(keys, [(b"authorization", b"bearer  one ")]) == one == await tenant(keys, [(b"x-api-key", b"one")])
    assert await tenant(keys, [(b"authorization", b"Bearer none"), (b"x-api-key", b"one")]) == one
    assert "one" not in one
    for wrong in ([], [(b"authorization", b"one")], [(b"authorization", b"Basic one")], [(b"authorization", b"Bearer")],
                  [(b"x-api-key", b"")], [(b"x-api-key", b"On\xe9")], [(b"authorization", b"Bearer one two")],
                  [(b"x-api-key", b"one" * 10_000)]):  # fmt: skip
        assert await tenant(keys, wrong) is None


async def test_a_key_is_looked_up_by_a_keyed_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one lookup, by a keyed digest that clients cannot compute, so timing reveals no
    key."""
    looked_up: list[bytes] = []

    class Spied(dict[bytes, str]):
        def get(self, tag: bytes, default: Any = None) -> Any:
            looked_up.append(tag)
            return super().get(tag, default)

        def __iter__(self) -> Any:
            raise AssertionError("keys are not compared one by one")

        items = keys = values = __iter__  # type: ignore[assignment]

    names = [f"key-{i}" for i in range(20_000)]
    first, second = access(*names, tmp_path=tmp_path), access(*names, tmp_path=tmp_path)
    for keys in (first, second):
        monkeypatch.setattr(keys._store, "_holders", Spied(keys._store._holders))  # type: ignore[attr-defined]
        for given in (b"key-0", b"key-19999", b"none", b"a much longer one than all the others"):
            await tenant(keys, [(b"x-api-key", given)])
    assert len(looked_up) == 8 and {len(tag) for tag in looked_up} == {32}
    assert set(looked_up[:4]).isdisjoint(looked_up[4:])  # the secret differs in each process
    assert hashlib.sha256(b"key-0").digest() not in looked_up
    assert await tenant(first, [(b"x-api-key", b"key-7")]) == await tenant(second, [(b"x-api-key", b"key-7")]) is not None


async def test_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\ufeffplain\n# ours\n\n  sha256:{hashlib.sha256(b'hashed').hexdigest()}  \n")
    keys = KeyAccess(lambda: FileKeyStore(KeyStoreContext("third", str(file))))
    assert keys.num_tenants == 3
    assert all([await tenant(keys, [(b"x-api-key", key)]) for key in (b"plain", b"hashed", b"third")])
    assert tenant_of(f"sha256:{hashlib.sha256(b'plain').hexdigest()}") == await tenant(keys, [(b"x-api-key", b"plain")])


async def test_a_reload_changes_keys_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "ring"
    keys = access("one", tmp_path=tmp_path)
    file.write_text("two")
    assert await tenant(keys, [(b"x-api-key", b"one")])
    await keys.use_store(keys.make_store())
    assert await tenant(keys, [(b"x-api-key", b"two")]) and not await tenant(keys, [(b"x-api-key", b"one")])
    file.write_text("")
    with pytest.raises(ConfigurationError, match="contains no key"):
        keys.make_store()
    assert await tenant(keys, [(b"x-api-key", b"two")])


@pytest.mark.parametrize("content", [b"", b"# no key\n", b"sha256:abc\n", b"sha256:" + b"zz" * 32, b"\xff\xfe"])
def test_invalid_key_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="api_keys") as error:
        FileKeyStore(KeyStoreContext(api_keys=str(file)))
    assert "zz" not in str(error.value)


def test_missing_key_file_and_empty_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        FileKeyStore(KeyStoreContext(api_keys=str(tmp_path / "none")))
    with pytest.raises(ConfigurationError, match="empty"):
        FileKeyStore(KeyStoreContext(" "))


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ({"key_store": "file"}, "has the keys of server.api_key and server.api_keys, of which none is set"),
        ({"key_store": "http", "api_key": "k"}, "reads neither server.api_key nor server.api_keys"),
        ({"key_store": "htp"}, "did you mean 'http'"),
    ],
)
def test_a_store_that_does_not_fit_the_settings(server: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        prepare(FrameConfig.model_validate({"server": server}))


class Broken(KeyStore):
    """Knows no key at the moment, in several ways."""

    name = "broken"
    error: Exception | None = None
    tenant = "x"

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        if Broken.error is not None:
            raise Broken.error
        return KeyHolder(Broken.tenant, is_operator=key == b"operator")


@pytest.mark.parametrize("error", [KeyStoreError("no connection"), RuntimeError("secret detail"), TimeoutError()])
async def test_a_store_that_fails_opens_to_none(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "error", error)
    async with serving({"server": {"api_key": "k"}}) as server:
        await server.services.keys.use_store(Broken(KeyStoreContext()))  # type: ignore[union-attr]
        for path in ("/v1/models", "/nowhere", "/server_info", "/v1/completions"):
            reply = await server.request("GET", path, headers=((b"x-api-key", b"k"),))
            assert (reply.status, reply.headers.get("retry-after")) == (503, "1"), path
            assert b"secret" not in reply.body
        assert (await server.request("GET", "/health")).status == 200  # open routes need no key store


async def test_a_tenant_that_is_no_name_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving({"server": {"api_key": "k"}}) as server:
        await server.services.keys.use_store(Broken(KeyStoreContext()))  # type: ignore[union-attr]
        assert (await server.request("GET", "/v1/models", headers=((b"x-api-key", b"k"),))).status == 200
        for name in ("", "a b", "x" * 65, "a\nb", "ü"):
            monkeypatch.setattr(Broken, "tenant", name)
            assert (await server.request("GET", "/v1/models", headers=((b"x-api-key", b"k"),))).status == 503


async def test_an_operators_key_opens_operators_routes() -> None:
    async with serving({"server": {"api_key": "k"}}) as server:
        await server.services.keys.use_store(Broken(KeyStoreContext()))  # type: ignore[union-attr]
        user, operator = ((b"x-api-key", b"user"),), ((b"x-api-key", b"operator"),)
        assert (await server.request("GET", "/server_info", headers=user)).status == 403
        assert (await server.request("GET", "/server_info", headers=operator)).status == 200
        assert (await server.request("GET", "/v1/models", headers=operator)).status == 200
        foreign = (*operator, (b"origin", b"https://evil.example"), (b"sec-fetch-site", b"cross-site"))
        assert (await server.request("GET", "/server_info", headers=foreign)).status == 200  # a page cannot send the key


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigurationError, match="insecure"):
        check_exposure(ServerSection(host=host))
    check_exposure(ServerSection(host=host, api_key="k"))
    check_exposure(ServerSection(host=host, key_store="http"))
    check_exposure(ServerSection(host=host, insecure=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure(ServerSection(host=host))
    assert ServerSection().host == "127.0.0.1"


ODD_PATHS = ("/nowhere", "//generate", "/health/../generate", "/generate/", "/%67enerate", "/HEALTH", "http://x/health",
             "/v1/models/..", "/health;/generate", "/health\\..\\generate", "*")  # fmt: skip


async def test_every_path_needs_a_key() -> None:
    async with serving({"server": {"api_key": "secret"}}) as server:
        paths = [(method, o.path, o.access) for o in ROUTES for method in o.methods]
        for method, path, access in paths + [("POST", path, Access.USER) for path in ODD_PATHS]:
            for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"x-api-key", b"wrong")]):
                reply = await server.request(method, path, b"{}", headers)
                # Health, and the page's own files, which say nothing of the server
                if access is Access.OPEN:
                    assert reply.status == (404 if "{" in path else 200)
                else:
                    # In the error shape of its API
                    assert (reply.status, b"the API key is missing or wrong" in reply.body) == (401, True), path
                    assert reply.headers["www-authenticate"] == "Bearer"
        for headers in ([(b"authorization", b"Bearer secret")], [(b"x-api-key", b"secret")]):
            assert (await server.request("GET", "/v1/models", headers=headers)).status == 200
            assert (await server.request("GET", "/nowhere", headers=headers)).status == 404


async def cached(server: Any, key: str, **more: Any) -> int:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, **more}
    reply = await server.post("/generate", body, x_api_key=key)
    assert reply.status == 200, reply.body
    return int(reply.json()["meta_info"]["cached_tokens"])


async def test_keys_do_not_see_each_others_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    async with serving({"server": {"api_keys": str(file)}}) as server:
        assert await cached(server, "one") == 0
        assert await cached(server, "one") > 0
        assert await cached(server, "two") == 0  # another key's prompt is not cached for this one
        # Nor its own prompt under another salt
        assert await cached(server, "one", cache_salt="a") == 0
        assert await cached(server, "one", cache_salt="a") > 0
        assert await cached(server, "two", cache_salt="a") == 0
    async with serving({"server": {"api_keys": str(file), "share_cache": True}}) as server:
        assert await cached(server, "one") == 0
        assert await cached(server, "two") > 0


async def test_requests_of_a_key_are_limited(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    async with serving({"server": {"api_keys": str(file), "max_requests_per_key": 1}}) as server:
        replies = await asyncio.gather(*(server.post("/generate", body, x_api_key=key) for key in ("one", "one", "two")))
        assert [reply.status for reply in replies] == [200, 429, 200]
        assert replies[1].headers["retry-after"] == "1"
        assert replies[1].json()["error"]["type"] == "rate_limit_error"
        # The quota is free again
        assert (await server.post("/generate", body, x_api_key="one")).status == 200
        await server.services.client.send_command("pause")
        later = (await server.post("/v1/responses", {"input": "hi", "max_output_tokens": 5, "background": True}, x_api_key="one")).json()
        # Even though its client does not wait
        assert (await server.post("/generate", body, x_api_key="one")).status == 429
        await server.services.client.send_command("resume")
        async with asyncio.timeout(20):
            while server.services.tasks:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.01)
        assert (await server.request("GET", f"/v1/responses/{later['id']}", headers=((b"x-api-key", b"one"),))).json()["output"]
        assert (await server.post("/generate", body, x_api_key="one")).status == 200
