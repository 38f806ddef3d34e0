"""How to reach a Kafka cluster: one set of settings for both clients in use, aiokafka and confluent-kafka.

The fields are librdkafka's configuration names with underscores for dots; what is not here keeps its default
there.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiokafka.abc import AbstractTokenProvider

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
# A bearer token and when it expires, in seconds since 1970. Asked for by any thread, for every new connection: whoever
# gives it keeps it as long as it is good. Where it raises, that is as if the broker had not answered.
SaslToken = Callable[[], tuple[str, float]]


# A broker that answers nothing for so long is left and called anew; librdkafka by itself would wait for a minute.
UNANSWERED_MS = 15_000
# A leader that is cut off from the other brokers answers who reads there that nothing is new: only they tell of its
# successor. By default they are asked every five minutes.
LEADERS_AGE_MS = 10_000
# "fetch.queue.backoff.ms" of whoever reads as fast as it can: by default a full queue stops fetching for a whole
# second, and what lay in it may be handled long before that is over.
FETCH_BACKOFF_MS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """The way to the brokers, with who we are there, by librdkafka's names."""

    bootstrap_servers: str
    client_id: str = "oncebox"
    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = None
    # With OAUTHBEARER, in place of name and password.
    sasl_token: SaslToken | None = None
    ssl_ca_location: str | None = None
    ssl_certificate_location: str | None = None
    ssl_key_location: str | None = None
    ssl_key_password: str | None = None
    ssl_endpoint_identification_algorithm: Literal["https", "none"] = "https"
    socket_connection_setup_timeout_ms: int = 10_000
    connections_max_idle_ms: int = 540_000  # below the broker's ten minutes, so that we close first

    def __post_init__(self) -> None:
        if not self.bootstrap_servers:
            raise ValueError("bootstrap_servers is empty: name at least one broker as host:port")
        if self.security_protocol.startswith("SASL"):
            if self.sasl_mechanism == "OAUTHBEARER":
                if self.sasl_token is None:
                    raise ValueError("OAUTHBEARER needs sasl_token")
            elif not (self.sasl_username and self.sasl_password):
                raise ValueError(f"{self.security_protocol} needs sasl_username and sasl_password")

    def __repr__(self) -> str:
        # Settings end up in logs; passwords must not.
        return f"KafkaSettings({self.security_protocol}://{self.bootstrap_servers})"


class _TokenProvider(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    def __init__(self, token: SaslToken) -> None:
        self._token = token

    async def token(self) -> str:
        try:
            return (await asyncio.to_thread(self._token))[0]
        except Exception as error:
            # Whoever gives out tokens may be away for a moment, as brokers may: the next attempt asks again.
            raise ConnectionError(f"sasl_token has raised {error!r}") from error


def aiokafka_options(settings: KafkaSettings) -> dict[str, Any]:
    """Keyword arguments for aiokafka's connections and clients, which share them."""
    options: dict[str, Any] = {
        "client_id": settings.client_id,
        "security_protocol": settings.security_protocol,
    }
    if settings.security_protocol.startswith("SASL"):
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = settings.sasl_password
        if settings.sasl_token is not None:
            options["sasl_oauth_token_provider"] = _TokenProvider(settings.sasl_token)
    if settings.security_protocol.endswith("SSL"):
        context = ssl.create_default_context(cafile=settings.ssl_ca_location)
        context.check_hostname = settings.ssl_endpoint_identification_algorithm == "https"
        if settings.ssl_certificate_location:
            context.load_cert_chain(
                settings.ssl_certificate_location, settings.ssl_key_location, settings.ssl_key_password
            )
        options["ssl_context"] = context
    return options


def librdkafka_config(settings: KafkaSettings) -> dict[str, Any]:
    """The same connection for confluent-kafka's clients, to be completed with what each of them needs."""
    config: dict[str, Any] = {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": settings.client_id,
        "security.protocol": settings.security_protocol,
        "socket.connection.setup.timeout.ms": settings.socket_connection_setup_timeout_ms,
        "connections.max.idle.ms": settings.connections_max_idle_ms,
        "socket.timeout.ms": UNANSWERED_MS,
        "topic.metadata.refresh.interval.ms": LEADERS_AGE_MS,
    }
    if settings.security_protocol.startswith("SASL"):
        config["sasl.mechanism"] = settings.sasl_mechanism
        if (token := settings.sasl_token) is not None:
            config["oauth_cb"] = lambda _config: token()
        else:
            config["sasl.username"] = settings.sasl_username or ""
            config["sasl.password"] = settings.sasl_password or ""
    if settings.security_protocol.endswith("SSL"):
        config["ssl.endpoint.identification.algorithm"] = settings.ssl_endpoint_identification_algorithm
        for name in ("ca_location", "certificate_location", "key_location", "key_password"):
            value = getattr(settings, f"ssl_{name}")
            if value:
                config[f"ssl.{name.replace('_', '.')}"] = value
    return config
