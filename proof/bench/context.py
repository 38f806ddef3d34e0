"""What a bench is given: how long to measure, whom to tell, and real parts that are started when first asked for.
Parts that the user names (ONCEBOX_BOOTSTRAP_SERVERS) are used instead of local ones.
"""

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from oncebox.local import LocalPostgres
    from proof.bench.instances import Coordinator

ROUNDS, ROUNDS_QUICK = 5, 3
DURATION_S, DURATION_QUICK_S = 10.0, 2.0
DEFAULT_TIMEOUTS = {
    "broker.session.timeout.ms": "9000",
    "broker.heartbeat.interval.ms": "2000",
    "group.initial.rebalance.delay.ms": "3000",
}


@dataclass(kw_only=True)
class Context:
    """One for all benches of a run; leaving it (a context manager) stops what it has started."""

    quick: bool  # smaller data, fewer sizes
    rounds: int  # of each side; what takes long has its own number
    duration_s: float  # of one round of one side
    progress: Callable[[str], None] = print
    parts: dict[str, str] = field(default_factory=dict)  # what was measured on, for the report
    _started: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started.close()

    @cached_property
    def bootstrap_servers(self) -> str:
        return self._start_kafka("Kafka", brokers=1)

    @cached_property
    def replicated_servers(self) -> str:
        """Three brokers with Kafka's own timeouts, not the shorter ones that local brokers have otherwise."""
        return self._start_kafka("Kafka, replicated", brokers=3, properties=DEFAULT_TIMEOUTS)

    def _start_kafka(self, part: str, *, brokers: int, properties: Mapping[str, str] | None = None) -> str:
        given = os.environ.get("ONCEBOX_BOOTSTRAP_SERVERS")
        if given:
            self.parts["Kafka"] = given
            return given
        from oncebox.local import LocalKafka
        from oncebox.local.jars import KAFKA_VERSION

        self.progress("starting Kafka")
        self.parts[part] = f"{KAFKA_VERSION}, {brokers} broker{'s' if brokers > 1 else ''} on this machine"
        kafka = LocalKafka(self.new_folder(), brokers=brokers, properties=properties, progress=self.progress)
        return self._started.enter_context(kafka).bootstrap_servers

    @cached_property
    def _postgres_dsn(self) -> Callable[[str], str]:
        settings = {"shared_buffers": "256MB", "max_wal_size": "8GB", "fsync": "off"}
        return self._started.enter_context(self.postgres("PostgreSQL", settings)).dsn_of

    @contextmanager
    def postgres(self, part: str, settings: Mapping[str, str] | None = None) -> Iterator["LocalPostgres"]:
        """A server of its own, told as this part of the report."""
        import psycopg

        from oncebox.local import LocalPostgres

        self.progress("starting PostgreSQL")
        with LocalPostgres(self.new_folder(), settings=settings) as server:
            # As the server says itself: whether a commit waits for the disk is most of what it costs.
            asked = "SELECT split_part(current_setting('server_version'), ' ', 1), current_setting('fsync')"
            with psycopg.connect(server.dsn) as connection:
                [(version, fsync)] = connection.execute(asked).fetchall()
            self.parts[part] = f"{version}, fsync {fsync}, on this machine"
            yield server

    def new_database(self) -> str:
        """The DSN of an empty one, on a server that is started for the benches."""
        import psycopg

        name = f"bench_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(self._postgres_dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._postgres_dsn(name)

    def new_folder(self) -> Path:
        return Path(self._started.enter_context(tempfile.TemporaryDirectory(prefix="oncebox-bench-")))

    @cached_property
    def coordinator_address(self) -> str:
        """One instance on a log of its own."""
        return self.start_coordinator().address

    def start_coordinator(self, **environment: str) -> "Coordinator":
        from proof.bench.instances import Coordinator

        return self._started.enter_context(Coordinator(self.bootstrap_servers, self.new_folder(), environment))

    def new_topic(self, *, partitions: int, servers: str | None = None) -> str:
        """Deleted when the bench is over."""
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        name = f"oncebox-bench-{uuid.uuid4().hex[:12]}"
        admin = AdminClient({"bootstrap.servers": servers or self.bootstrap_servers})
        admin.create_topics([NewTopic(name, partitions)], operation_timeout=30)[name].result(60)
        self.delete_at_end([name], servers=servers)
        return name

    def delete_at_end(self, topics: Sequence[str], *, servers: str | None = None) -> None:
        """The brokers may be the user's own."""
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": servers or self.bootstrap_servers})

        def delete() -> None:
            for deleted in admin.delete_topics(list(topics)).values():
                deleted.result(60)

        self._started.callback(delete)
