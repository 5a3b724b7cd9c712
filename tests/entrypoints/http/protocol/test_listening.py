"""The ports of both listeners: either address family, and a sentence for what is taken."""

from __future__ import annotations

import socket

import pytest

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.http.protocol.listening import AdminListener, address, bound_port


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_of_either_address_family(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with bound_port(host, 0, "--port") as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigurationError) as refused:
            AdminListener(ServerSection(admin_host=host, admin_port=port))
    assert f"cannot listen on {address(host, port)} (" in str(refused.value)
    assert str(refused.value).endswith("choose another with --admin-port")


def test_addresses_as_urls_have_them() -> None:
    assert (address("127.0.0.1", 80), address("::1", 80)) == ("127.0.0.1:80", "[::1]:80")
