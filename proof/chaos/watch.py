"""Those who only look, all the time: a stock consumer that reads committed data, and somebody who asks PostgreSQL for
the sums of all tables at one instant. Each is a thread that writes down what it sees.
"""

import json
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition

from proof.chaos.history import Look, Placed, Poll, Recorder, Stuck, Sum, now_ns
from proof.chaos.workload import PARTITIONS, TOPICS

POLL_RECORDS_MAX = 500
POLL_S = 0.3
LOOK_EVERY_S = 0.1
SUMS = " UNION ALL ".join(
    f"SELECT '{table}', count(*), coalesce(sum(amount), 0)::bigint, coalesce(sum(hashtext(op)::bigint), 0)::bigint "  # noqa: S608
    f"FROM {table}"
    for table in TOPICS
)


class Watcher(ABC):
    """Use as a context manager; `count` says how much it has seen."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.count = 0
        self.is_over = threading.Event()
        self._recorder = Recorder(path)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - a watcher that has gone sees no anomalies
            self._recorder.add(Stuck(at_ns=now_ns(), what=f"{self.name} ended by itself: {error!r}"))

    @abstractmethod
    def run(self) -> None: ...


class Poller(Watcher):
    """Reads all topics from their beginning, without a group, and never seeks."""

    def __init__(self, name: str, path: Path, bootstrap_servers: str, *, isolation: str = "read_committed") -> None:
        super().__init__(name, path)
        self._config = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": name,
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "log_level": 0,
        }

    def run(self) -> None:
        consumer = Consumer(self._config)
        consumer.assign([TopicPartition(t, p, OFFSET_BEGINNING) for t in TOPICS for p in range(PARTITIONS)])
        try:
            while not self.is_over.is_set():
                messages = consumer.consume(POLL_RECORDS_MAX, POLL_S)
                found = tuple(placed(message) for message in messages if message.error() is None)
                if found:
                    self._recorder.add(Poll(at_ns=now_ns(), reader=self.name, records=found))
                    self.count += len(found)
        finally:
            consumer.close()


class Looker(Watcher):
    def __init__(self, name: str, path: Path, dsn: str) -> None:
        super().__init__(name, path)
        self._dsn = dsn

    def run(self) -> None:
        while not self.is_over.wait(LOOK_EVERY_S):
            try:
                with psycopg.connect(self._dsn, autocommit=True, connect_timeout=5) as connection:
                    while not self.is_over.wait(LOOK_EVERY_S):
                        self._look(connection)
            except (psycopg.OperationalError, psycopg.InterfaceError):
                continue  # it is away; the next connection will show what is left of it

    def _look(self, connection: psycopg.Connection) -> None:
        found = connection.execute(SUMS.encode()).fetchall()
        sums = {table: Sum(*numbers) for table, *numbers in found}
        self._recorder.add(Look(at_ns=now_ns(), reader=self.name, sums=sums))
        self.count = sum(each.rows for each in sums.values())


def placed(message: Message) -> Placed:
    value = json.loads(message.value() or b"")
    return Placed(f"{message.topic()}-{message.partition()}", message.offset() or 0, value["item"], value["amount"])
