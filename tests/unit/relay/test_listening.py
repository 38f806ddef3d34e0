"""Who can reach a relay's control: this machine, whoever shows a certificate, or everybody who was let in by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from relay.config import RelaySettings

if TYPE_CHECKING:
    from pathlib import Path


def settings(**given: Any) -> RelaySettings:
    return RelaySettings(
        **{
            "name": "orders",
            "kafka": {"bootstrap_servers": "localhost:9092"},
            "postgres": {"dsn": "postgresql:"},
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
