"""Status and control of one relay process: gRPC for people and programs, HTTP for orchestrators and Prometheus."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from threading import Thread
from typing import TYPE_CHECKING, Any

import grpc
import psycopg
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from oncebox.certificates import ServerCertificates
from oncebox.v1 import relay_pb2, relay_pb2_grpc
from relay.access import Gate
from relay.control import Control
from relay.types import RelayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from relay.control import RelayStatus
    from relay.service import Relay

STATES = ("STARTING", "RUNNING", "PAUSED", "STANDBY", "WAITING", "STOPPED")
# Of people and programs that look at a relay now and then; its requests say next to nothing.
REQUEST_BYTES_MAX = 64 * 1024
METADATA_BYTES_MAX = 16 * 1024
STREAMS_MAX = 100
CONNECTIONS_MAX = 1_000
CONNECTION_AGE_MS = 12 * 3_600_000
CONNECTION_AGE_GRACE_MS = 30_000
CONNECTION_IDLE_MS = 900_000
HANDSHAKE_TIMEOUT_MS = 10_000
WELL = frozenset({"RUNNING", "PAUSED", "STANDBY"})


class RelayServer(relay_pb2_grpc.RelayServicer):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._settings = relay.settings
        self.gate = Gate(relay.settings)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="relay-control")
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(relay, self.gate, self._look))
        self._server: grpc.aio.Server | None = None
        self._http: ThreadingHTTPServer | None = None
        self.address = ""
        self.http_port = 0

    async def start(self) -> None:
        host = self._settings.listen_host
        bracketed = f"[{host}]" if ":" in host else host
        self._server = grpc.aio.server(
            interceptors=[self.gate], options=_options(has_tls=self._settings.tls is not None)
        )
        relay_pb2_grpc.add_RelayServicer_to_server(self, self._server)
        try:
            port = self._bind(self._server, f"{bracketed}:{self._settings.listen_port}")
            self._http = _http_server(host, self._settings.http_port, self._page)
        except (RuntimeError, OSError) as error:
            raise RelayError(f"cannot listen on {host}: {error}") from error
        self.address, self.http_port = f"{bracketed}:{port}", self._http.server_port
        await self._server.start()
        Thread(target=self._http.serve_forever, name="relay-http", daemon=True).start()

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        tls = self._settings.tls
        if tls is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, ServerCertificates(tls).credentials())
        return port

    async def stop(self) -> None:
        if self._http is not None:
            await asyncio.to_thread(self._http.shutdown)
            self._http.server_close()
        if self._server is not None:
            await self._server.stop(1)
        self._executor.shutdown(wait=False)

    # --- gRPC -------------------------------------------------------------------------------------------------------

    async def GetStatus(self, request: Any, context: Any) -> relay_pb2.GetStatusResponse:  # noqa: N802
        del request, context
        return await self._answer()

    async def Pause(self, request: Any, context: Any) -> relay_pb2.GetStatusResponse:  # noqa: N802
        del request
        return await self._set_paused(context, paused=True)

    async def Resume(self, request: Any, context: Any) -> relay_pb2.GetStatusResponse:  # noqa: N802
        del request
        return await self._set_paused(context, paused=False)

    async def _set_paused(self, context: Any, *, paused: bool) -> relay_pb2.GetStatusResponse:
        def change() -> None:
            with Control(self._settings) as control:
                control.set_paused(paused=paused)

        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, change)
        except (psycopg.Error, RelayError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the database does not answer: {error}")
        return await self._answer()

    async def _answer(self) -> relay_pb2.GetStatusResponse:
        status = self._relay.status
        found = await asyncio.get_running_loop().run_in_executor(self._executor, self._look)
        return relay_pb2.GetStatusResponse(
            name=status.name,
            instance=status.instance,
            state=status.state,
            message=status.message,
            fence=status.fence,
            positions=[
                relay_pb2.PartitionPosition(
                    topic=each.topic,
                    partition=each.partition,
                    offset_next=each.next_offset,
                    offset_end=each.end_offset,
                    lag_records=each.lag_records,
                    lag_ms=each.lag_ms,
                )
                for each in (found.partitions if found else ())
            ],
            rows_per_second=status.rows_per_second(),
            dead_letters=found.open_letters if found else status.letters,
            since_ms=status.since_ms,
        )

    def _look(self) -> RelayStatus | None:
        """None: the database or Kafka does not answer; what this process knows by itself is told all the same."""
        from confluent_kafka import KafkaException

        try:
            with Control(self._settings) as control:
                return control.status()
        except (psycopg.Error, KafkaException, RelayError, OSError):
            return None

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def _page(self, path: str) -> tuple[HTTPStatus, bytes]:
        if path == "/live":
            return HTTPStatus.OK, b"live\n"
        if path == "/ready":
            state = self._relay.status.state
            return HTTPStatus.OK if state in WELL else HTTPStatus.SERVICE_UNAVAILABLE, f"{state}\n".encode()
        if path == "/metrics":
            return HTTPStatus.OK, generate_latest(self._registry)
        return HTTPStatus.NOT_FOUND, b"known are /live, /ready, /metrics\n"


class _Collector:
    def __init__(self, relay: Relay, gate: Gate, look: Callable[[], RelayStatus | None]) -> None:
        self._relay = relay
        self._gate = gate
        self._look = look

    def collect(self) -> Iterator[Metric]:
        status = self._relay.status
        labels = [status.name]
        state = GaugeMetricFamily("oncebox_relay_state", "1 for the state it is in.", labels=["relay", "state"])
        for each in STATES:
            state.add_metric([*labels, each], float(each == status.state))
        yield state
        for name, told, value in (
            ("oncebox_relay_rows", "Changes of rows applied by this process.", status.rows),
            ("oncebox_relay_batches", "Database transactions committed by this process.", status.batches),
            ("oncebox_relay_retries", "Times this process began anew.", status.retries),
            ("oncebox_relay_refused_calls", "Calls of people and programs that it refused.", self._gate.refused),
        ):
            counter = CounterMetricFamily(name, told, labels=["relay"])
            counter.add_metric(labels, value)
            yield counter
        found = self._look()
        if found is None:
            return
        letters = GaugeMetricFamily("oncebox_relay_dead_letters", "Dead letters not resolved.", labels=["relay"])
        letters.add_metric(labels, found.open_letters)
        yield letters
        places = ["relay", "topic", "partition"]
        lag = GaugeMetricFamily("oncebox_relay_lag_records", "Offsets not applied.", labels=places)
        lag_s = GaugeMetricFamily("oncebox_relay_lag_seconds", "Age of the oldest record not applied.", labels=places)
        for each_place in found.partitions:
            where = [*labels, each_place.topic, str(each_place.partition)]
            lag.add_metric(where, each_place.lag_records)
            lag_s.add_metric(where, each_place.lag_ms / 1000)
        yield lag
        yield lag_s


def _http_server(host: str, port: int, page: Callable[[str], tuple[HTTPStatus, bytes]]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            status, body = page(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            del format, args

    class Server(ThreadingHTTPServer):
        address_family = AF_INET6 if ":" in host else AF_INET

    return Server((host, port), Handler)


def _options(*, has_tls: bool) -> list[tuple[str, int]]:
    # Only who has shown something can show it again.
    age = [
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
        ("grpc.max_connection_age_grace_ms", CONNECTION_AGE_GRACE_MS),
    ]
    return [
        *(age if has_tls else []),
        ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # A second relay on the same port is a mistake that must be told, not a share of the connections.
        ("grpc.so_reuseport", 0),
    ]
