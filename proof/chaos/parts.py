"""The parts of a run: brokers, PostgreSQL, coordinators, relays both ways, copiers, clients, the network between.

Nothing outlives this process. Coordinators keep their address over a restart; a client's successor has its
transactional.id and a history of its own.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psycopg
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic
from pydantic import SecretStr

from oncebox.local import LocalKafka, LocalPostgres
from oncebox.local.kafka import QUICK_START
from oncebox.local.ports import free_ports
from oncebox.settings import KafkaSection, PostgresSection
from proof.chaos.network import Network
from proof.chaos.planted import BUGS
from proof.chaos.workload import (
    COPIES,
    OUTBOX,
    OUTBOX_CONFIG,
    PARTITIONS,
    PASSER_BY,
    TOPICS,
    WORKLOADS,
    relay_config,
)
from proof.faults.clock import WallClock
from proof.faults.hosts import Hosts
from proof.faults.process import ChildProcess, ProcessError
from proof.faults.proxy import Proxy
from relay.outbox import setup
from relay.outbox.config import OutboxSettings

BROKERS = 3
COORDINATORS = 2
RELAYS = 2
OUTBOXES = 2
COPIERS = 2
CLIENTS_PER_WORKLOAD = 2
RELAY_SESSION_MS = 3_000
OUTBOX_TAKEOVER_MS = 4_000
# Where the outbox is; what comes back from Kafka is in another one.
SOURCE_DATABASE = "source"
# The coordinators' log is compacted all the time, also while one of them reads it: with short segments, and cleaners
# that are always at it.
LOG = "oncebox.log"
LOG_CONFIG = {
    "segment.bytes": "1048576",
    "segment.ms": "1000",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "1000",
}
CLEANERS = {"log.cleaner.backoff.ms": "1000"}
READY_S = 90.0
AGAIN_S = 0.2


class ChaosError(Exception):
    """The run itself could not be carried out."""


class ClientSeat:
    """A client's name, and the process that has it now."""

    def __init__(self, name: str, start: Callable[[str, int], ChildProcess]) -> None:
        self.name = name
        self._start = start
        self.incarnation = 0
        self.process = self._next()

    @property
    def is_fenced(self) -> bool:
        """Whether its successor has its transactional.id, so that it cannot go on."""
        return not self.name.startswith(OUTBOX)

    def _next(self) -> ChildProcess:
        self.incarnation += 1
        return self._start(self.name, self.incarnation)

    def replace(self) -> None:
        self.process = self._next()

    def await_begin(self) -> None:
        self.process.wait_ready(lambda: self.process.log_contains("begins"), timeout_s=READY_S)


class Parts:
    def __init__(
        self,
        folder: Path,
        running: ExitStack,
        seed: int,
        say: Callable[[str], None],
        *,
        planted: str = "",
        with_hosts: bool = False,
    ) -> None:
        """`planted`: a bug (proof.chaos.planted). `with_hosts`: each broker has a host of its own."""
        self.folder = folder
        self.histories = folder / "history"
        self.seed = seed
        self._running = running
        self._planted = planted
        self._passers_by = 0
        self.network = running.enter_context(Network())
        self.hosts = running.enter_context(Hosts(BROKERS)) if with_hosts else None
        say(f"starting a real Kafka ({BROKERS} brokers) and a real PostgreSQL")
        self._start_storage()
        self.coordinator_proxies, self.coordinators = self._start_coordinators()
        self.addresses = [proxy.address for proxy in self.coordinator_proxies]
        say(f"{COORDINATORS} coordinators at {' and '.join(self.addresses)}")
        self.relays = self._start_relays()
        self.outboxes = self._start_outboxes()
        self.copiers = [self._copier(number) for number in range(1, COPIERS + 1)]
        say(f"{RELAYS} relays and {OUTBOXES} outbox relays, of each one works and one stands by; {COPIERS} copiers")
        names = [f"{kind}-{number}" for kind in (*WORKLOADS, OUTBOX) for number in range(1, CLIENTS_PER_WORKLOAD + 1)]
        self.clients = [ClientSeat(name, self._client) for name in names]
        for seat in self.clients:
            seat.await_begin()
        say(f"{len(self.clients)} clients: {', '.join(names)}")

    @property
    def services(self) -> list[ChildProcess]:
        return [*self.coordinators, *self.relays, *self.outboxes, *self.copiers]

    def _start_storage(self) -> None:
        self.broker_proxies = [self.network.add(kafka=True) for _ in range(BROKERS)]
        self.kafka = self._running.enter_context(
            LocalKafka(
                self.folder / "kafka",
                brokers=BROKERS,
                properties=CLEANERS,
                jvm_options=[QUICK_START],
                advertised_ports=[proxy.port for proxy in self.broker_proxies],
                hosts=[self.hosts.host(number) for number in range(BROKERS)] if self.hosts is not None else None,
            )
        )
        for proxy, broker in zip(self.broker_proxies, self.kafka.brokers, strict=True):
            self.network.lead(proxy, broker.port, broker.host)
        self.servers = self.kafka.bootstrap_servers
        _create_topics(self.servers)
        self.postgres = self._running.enter_context(LocalPostgres(self.folder / "postgres"))
        self.postgres_proxy = self.network.add()
        self.network.lead(self.postgres_proxy, self.postgres.port)
        # The relays' and the clients' way to it; whoever looks and judges takes the direct one.
        self.dsn, self.source_dsn = self.postgres.dsn, self.postgres.dsn_of(SOURCE_DATABASE)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {SOURCE_DATABASE}")

    def _proxied(self, dsn: str) -> str:
        return dsn.replace(f":{self.postgres.port}/", f":{self.postgres_proxy.port}/")

    def _start_coordinators(self) -> tuple[list[Proxy], list[ChildProcess]]:
        proxies = [self.network.add() for _ in range(COORDINATORS)]
        children = []
        for number, (proxy, port) in enumerate(zip(proxies, free_ports(COORDINATORS), strict=True), start=1):
            self.network.lead(proxy, port)
            environment = {
                "ONCEBOX_BOOTSTRAP_SERVERS": self.servers,
                "ONCEBOX_COORDINATOR_LISTEN_PORT": str(port),
                "ONCEBOX_COORDINATOR_ADVERTISED_ADDRESS": proxy.address,
                "ONCEBOX_COORDINATOR_HTTP_PORT": "0",
            }
            children.append(self._child(self._module("coordinator"), f"coordinator-{number}", environment))
        await_serving(children)
        _compact_log(self.servers)
        return proxies, children

    def _start_relays(self) -> list[ChildProcess]:
        config = self.folder / "relay.yaml"
        config.write_text(relay_config(servers=self.servers, dsn=self._proxied(self.dsn), session_ms=RELAY_SESSION_MS))
        children = [self._child([*self._module("relay"), str(config)], f"relay-{n}") for n in range(1, RELAYS + 1)]
        _await_tables(self.dsn)
        await_serving(children)
        return children

    def _start_outboxes(self) -> list[ChildProcess]:
        settings = OutboxSettings(
            kafka=KafkaSection(bootstrap_servers=self.servers),
            postgres=PostgresSection(dsn=SecretStr(self.source_dsn)),
            name="chaos",
        )
        asyncio.run(_set_up(settings))
        config = self.folder / "outbox.yaml"
        config.write_text(
            OUTBOX_CONFIG.format(
                servers=self.servers,
                dsn=self._proxied(self.source_dsn),
                coordinators=",".join(self.addresses),
                takeover_ms=OUTBOX_TAKEOVER_MS,
            )
        )
        module = self._module("proof.chaos.outbox")
        children = [self._child([*module, str(config)], f"outbox-{n}") for n in range(1, OUTBOXES + 1)]
        await_serving(children)
        return children

    def _copier(self, number: int) -> ChildProcess:
        name = f"copier-{number}"
        history = self.histories / f"{name}.jsonl"
        arguments = [self.servers, ",".join(self.addresses), name, str(history)]
        return self._child([*self._module("proof.chaos.copier"), *arguments], name)

    def _client(self, name: str, incarnation: int) -> ChildProcess:
        history = self.histories / f"{name}.{incarnation}.jsonl"
        kind = name.partition("-")[0]
        if kind == OUTBOX:
            arguments = ["proof.chaos.database_client", self._proxied(self.source_dsn)]
        else:
            arguments = ["proof.chaos.client", self.servers, ",".join(self.addresses), kind]
        arguments += [name, str(incarnation), str(self.seed), str(history)]
        return self._child(arguments, f"client-{name}.{incarnation}")

    def _module(self, module: str) -> list[str]:
        """With the planted bug, if it is one of this module's."""
        bugged = self._planted and BUGS[self._planted].module == module
        return ["proof.chaos.planted", self._planted] if bugged else [module]

    def _child(self, arguments: list[str], name: str, environment: dict[str, str] | None = None) -> ChildProcess:
        log = self.folder / f"{name}.log"
        command = [sys.executable, *self._clock(name).command(*arguments)]
        return self._running.enter_context(ChildProcess(command, log=log, environment=environment))

    def _clock(self, name: str) -> WallClock:
        return WallClock(self.folder / "clocks" / name)

    def clock_of(self, process: ChildProcess) -> WallClock:
        return self._clock(process.log.stem)

    def passer_by(self) -> ChildProcess:
        """A client that is about to leave transactions open; nobody will ever take its transactional.ids."""
        self._passers_by += 1
        return self._client(f"{PASSER_BY}-{self._passers_by}", 1)

    def look_after(self) -> list[str]:
        """To be called while no fault is under way: who ended by itself, and is started again."""
        told = []
        for process in [*self.services, *(seat.process for seat in self.clients)]:
            if not process.running:
                told.append(f"{process.log.stem} ended by itself ({process.wait()}): {process.log_tail(3)}")
                seats = [seat for seat in self.clients if seat.process is process]
                for seat in seats:
                    seat.replace()
                if not seats:
                    process.start()
        for broker in self.kafka.brokers:
            if not broker.running:
                told.append(f"broker {broker.node_id} ended by itself: see {broker.log_path}")
                broker.start()
        if not self.postgres.running:
            told.append(f"PostgreSQL ended by itself: see {self.postgres.log_path}")
            self.postgres.restart()
        return told


async def _set_up(settings: OutboxSettings) -> None:
    await setup.run(settings, await setup.plan(settings))


def await_serving(processes: Sequence[ChildProcess]) -> None:
    for process in processes:
        try:
            process.wait_ready(lambda process=process: process.log_contains("serves at"), timeout_s=READY_S)  # type: ignore[misc]
        except ProcessError as error:
            raise ChaosError(str(error)) from error


def _await_tables(dsn: str) -> None:
    """Until the first relay has made them."""
    query = "SELECT count(*) FROM unnest(%s::text[]) AS name WHERE to_regclass(name) IS NOT NULL"
    with psycopg.connect(dsn, autocommit=True) as connection:
        if not until(lambda: connection.execute(query, [list(TOPICS)]).fetchone() == (len(TOPICS),), READY_S):
            raise ChaosError("the relay has not made its tables")


def until(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(AGAIN_S)
    return True


def _create_topics(bootstrap_servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    wanted = [NewTopic(topic, PARTITIONS, config={"min.insync.replicas": "2"}) for topic in (*TOPICS, COPIES)]
    for future in admin.create_topics(wanted).values():
        future.result()


def _compact_log(bootstrap_servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in LOG_CONFIG.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, LOG, incremental_configs=entries)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()
