"""Who can reach a relay's control: this machine, whoever shows a certificate, or everybody who was let in by name."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
from pydantic import ValidationError

from relay.config import RelaySettings
from relay.server import RelayServer
from relay.service import Relay
from relay.types import RelayError

if TYPE_CHECKING:
    from pathlib import Path


def settings(**given: Any) -> RelaySettings:
    return RelaySettings(
        **{
            "name": "orders",
            "kafka": {"bootstrap_servers": "localhost:9092"},
            "postgres": {"dsn": "postgresql://"},
            "tables": [{"topic": "orders", "key": "id"}],
            **given,
        }
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_this_machine(host: str):
    assert settings(listen_host=host).tls is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.6", "relay.example"])
def test_other_machines_only_with_certificates_or_if_it_is_meant(host: str, tmp_path: Path):
    with pytest.raises(ValidationError, match="reachable from other machines, without TLS"):
        settings(listen_host=host)
    assert settings(listen_host=host, insecure_listen=True).insecure_listen
    file = tmp_path / "any.pem"
    file.touch()
    with pytest.raises(ValidationError, match="client_ca_location"):
        settings(listen_host=host, tls={"certificate_location": file, "key_location": file})
    given = dict.fromkeys(("certificate_location", "key_location", "client_ca_location"), file)
    assert settings(listen_host=host, tls=given).tls


@pytest.mark.parametrize("which", ["listen_port", "http_port"])
async def test_a_port_in_use_is_told(which: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"listen_port": 0, "http_port": 0, which: taken.getsockname()[1]}
        server = RelayServer(Relay(settings(**ports)))
        with pytest.raises(RelayError, match=r"cannot listen on 127\.0\.0\.1"):
            await server.start()


async def test_a_port_that_another_relay_listens_on_is_refused():
    first = RelayServer(Relay(settings(listen_port=0, http_port=0)))
    await first.start()
    try:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(RelayError, match=r"cannot listen on 127\.0\.0\.1"):
            await RelayServer(Relay(settings(listen_port=port, http_port=0))).start()
    finally:
        await first.stop()


def page(address: str) -> bytes:
    with urlopen(address, timeout=10) as found:
        text: bytes = found.read()
    return text


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
async def test_it_listens_on_an_address_with_colons():
    server = RelayServer(Relay(settings(listen_host="::1", listen_port=0, http_port=0)))
    await server.start()
    try:
        assert server.address.startswith("[::1]:")
        assert await asyncio.to_thread(page, f"http://[::1]:{server.http_port}/live") == b"live\n"
    finally:
        await server.stop()
