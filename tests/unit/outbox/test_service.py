"""The process around an outbox relay."""

import socket

import pytest
from pydantic import SecretStr

from oncebox.settings import KafkaSection, PostgresSection, SettingsError
from relay.outbox import service
from relay.outbox.config import OutboxSettings


async def test_a_port_in_use_is_told_before_anything_is_read():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = OutboxSettings(
            kafka=KafkaSection(bootstrap_servers="127.0.0.1:1"),
            postgres=PostgresSection(dsn=SecretStr("postgresql://127.0.0.1:1/x")),
            http_port=port,
        )
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port} for metrics .*set http_port to another"):
            await service.run(settings, lambda: settings)
