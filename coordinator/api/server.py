"""The gRPC server and the small HTTP one beside it: built, started, and stopped without cutting anybody off.

Bound first, so that its address is known to the rest before that is built; NOT_SERVING until it is told otherwise.
"""

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.api.admin import AdminService
from coordinator.api.auth import Gate
from coordinator.api.front import FindInFeed, Front
from coordinator.api.guard import Guard, Streams
from coordinator.api.pages import Page, Pages, serve_pages
from coordinator.api.rules import Rules, Topics
from coordinator.api.unary import CoordinatorService
from coordinator.calls import Calls
from coordinator.config import CoordinatorSettings, internal_topics
from coordinator.hanging import Hanging
from coordinator.telemetry import Telemetry
from oncebox.certificates import ServerCertificates
from oncebox.v1.admin_pb2_grpc import add_AdminServicer_to_server
from oncebox.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server

COORDINATOR = "oncebox.v1.Coordinator"
ADMIN = "oncebox.v1.Admin"
# How soon a connection that fell silent is noticed, and how often clients may ask for signs of life. Longer than
# the 20 s after which a client with default settings sends its next heartbeat: who is heard of needs no ping.
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
PING_INTERVAL_MIN_MS = 5_000
# For answers that are written but not sent yet.
LAST_ANSWERS_S = 0.5

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Service(NamedTuple):
    """One more gRPC service on the same port."""

    name: str
    add_to: Callable[[Any], None]


class PortTakenError(Exception):
    """The address to listen on cannot be had."""


class Api:
    def __init__(self, settings: CoordinatorSettings, telemetry: Telemetry | None = None) -> None:
        self._settings = settings
        self._telemetry = telemetry or Telemetry()
        self.gate = Gate(settings)
        self.certificates = ServerCertificates(settings.tls) if settings.tls else None
        self._guard = Guard(self.gate, self._telemetry)
        self._streams = Streams()
        self._health = health.aio.HealthServicer()
        self._is_ready = False
        self._http: asyncio.Server | None = None
        self._server = grpc.aio.server(
            interceptors=[self._guard],
            options=_options(settings),
            maximum_concurrent_rpcs=settings.limits.calls,
        )
        host = f"[{settings.listen_host}]" if ":" in settings.listen_host else settings.listen_host
        try:
            self.port: int = self._bind(f"{host}:{settings.listen_port}")
        except RuntimeError as error:
            raise PortTakenError(
                f"cannot listen on {host}:{settings.listen_port}: the port is taken, or the host is not ours. "
                "Set listen_port to another, or to 0 for any free one"
            ) from error
        # Where others reach this instance.
        self.address = settings.advertised_address or f"{host}:{self.port}"

    def _bind(self, address: str) -> int:
        if self.certificates is None:
            port: int = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self.certificates.credentials())
        return port

    @property
    def http_port(self) -> int:
        """0 before the start."""
        port: int = self._http.sockets[0].getsockname()[1] if self._http else 0
        return port

    async def start(
        self,
        *,
        calls: Calls,
        topics: Topics,
        find_in_feed: FindInFeed,
        hanging: Hanging,
        now_ms: Callable[[], int],
        services: Sequence[Service] = (),
        pages: Pages | None = None,
        make_gateway: Callable[[Front], Service] | None = None,
    ) -> None:
        limits = self._settings.limits
        rules = Rules(
            topics=topics,
            internal_topics=internal_topics(self._settings),
            transaction_timeout_max_ms=limits.transaction_timeout_max_ms,
            partitions_max=limits.partitions_per_call,
            groups_max=limits.groups_per_call,
            metadata_max_bytes=limits.metadata_bytes,
        )
        front = Front(
            calls=calls,
            rules=rules,
            find_in_feed=find_in_feed,
            call_timeout_ms=limits.call_timeout_ms,
            call_timeout_max_ms=limits.call_timeout_max_ms,
        )
        coordinator = CoordinatorService(front, self._streams, self._telemetry, limits.requests_per_session)
        add_CoordinatorServicer_to_server(coordinator, self._server)
        add_AdminServicer_to_server(AdminService(front, self._streams, hanging, now_ms), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if make_gateway is not None:
            services = [*services, make_gateway(front)]
        for service in services:
            service.add_to(self._server)
        names = (COORDINATOR, ADMIN, *(service.name for service in services))
        if self._settings.reflection:
            reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        for name in names:
            await self._health.set(name, _SERVING)
        await self.set_ready(is_ready=False)
        await self._server.start()
        host, port = self._settings.http_host or self._settings.listen_host, self._settings.http_port
        try:
            self._http = await serve_pages(
                host,
                port,
                {"/live": lambda: Page(HTTPStatus.OK, b"live\n"), "/ready": self._ready_page, **(pages or {})},
            )
        except OSError as error:
            raise PortTakenError(
                f"cannot listen on {host}:{port} for HTTP: the port is taken, or the host is not ours. "
                "Set http_port to another, or to 0 for any free one"
            ) from error

    async def set_ready(self, *, is_ready: bool) -> None:
        """Whether the group has said which partitions are this instance's, be it none, and all of them are served:
        what health and readiness tell.
        """
        self._is_ready = is_ready
        for name in ("", COORDINATOR):
            await self._health.set(name, _SERVING if is_ready else _NOT_SERVING)

    async def stop(self, within_s: float) -> None:
        """Takes no new calls, ends the endless ones, and lets the others come to their end."""
        self._is_ready = False
        await self._health.enter_graceful_shutdown()
        self._streams.drain()
        stopping = asyncio.create_task(self._server.stop(max(within_s, LAST_ANSWERS_S)))
        idle = asyncio.create_task(self._guard.wait_idle())
        await asyncio.wait((stopping, idle), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        # All of ours are answered; what is left are watchers of the health service, who would use up the whole time.
        await self._server.stop(LAST_ANSWERS_S)
        await stopping
        if self._http is not None:
            self._http.close()
            await self._http.wait_closed()

    def _ready_page(self) -> Page:
        if self._is_ready:
            return Page(HTTPStatus.OK, b"ready\n")
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"loading, or going down\n")


def _options(settings: CoordinatorSettings) -> list[tuple[str, int]]:
    limits = settings.limits
    # Only who has shown something can show it again.
    age = [
        ("grpc.max_connection_age_ms", limits.connection_age_ms),
        ("grpc.max_connection_age_grace_ms", limits.connection_age_grace_ms),
    ]
    return [
        *(age if settings.tls else []),
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.max_concurrent_streams", limits.streams_per_connection),
        ("grpc.max_metadata_size", limits.metadata_headers_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_headers_bytes),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_connection_idle_ms", limits.connection_idle_ms),
        ("grpc.server_handshake_timeout_ms", limits.handshake_timeout_ms),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # A fixed window, not a measured one: that takes a ping with nearly every message (docs/decisions/0014).
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", limits.message_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
        # A second instance on the same port is a mistake that must be told, not a share of the connections.
        ("grpc.so_reuseport", 0),
    ]
