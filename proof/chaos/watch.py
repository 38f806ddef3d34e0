"""Those who only look, all the time: a stock consumer that reads committed data, and somebody who asks PostgreSQL for
the sums of all tables at one instant. Each is a thread that writes down what it sees; told to stop, it first looks at
all that is there by then.
"""

import json
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Self

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from proof.chaos.history import Look, Placed, Poll, Recorder, Stuck, Sum, now_ns
from proof.chaos.workload import PARTITIONS, TOPICS

POLL_RECORDS_MAX = 500
POLL_S = 0.3
LOOK_EVERY_S = 0.1
# For what is still to be seen when it is told to stop: a stock consumer may first have to give up a connection that has
# fallen silent.
LAST_S = 120.0
ASK_S = 10.0
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
        self._thread.join(timeout=LAST_S + 30)

    def _run(self) -> None:
        with self._recorder:
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
            "enable.partition.eof": True,
            "log_level": 0,
        }
        # How far it has come, markers and all.
        self._reached: dict[tuple[str, int], int] = {}

    def run(self) -> None:
        consumer = Consumer(self._config)
        places = [TopicPartition(t, p, OFFSET_BEGINNING) for t in TOPICS for p in range(PARTITIONS)]
        consumer.assign(places)
        try:
            while not self.is_over.is_set():
                self._poll(consumer)
            deadline_s = time.monotonic() + LAST_S
            missing = dict.fromkeys(((place.topic, place.partition) for place in places), -1)
            while missing and time.monotonic() < deadline_s:
                self._poll(consumer)
                missing = self._behind(consumer, missing)
        finally:
            consumer.close()

    def _poll(self, consumer: Consumer) -> None:
        found = []
        for message in consumer.consume(POLL_RECORDS_MAX, POLL_S):
            where, error, offset = (message.topic() or "", message.partition() or 0), message.error(), message.offset()
            if error is None:
                found.append(placed(message))
                self._reached[where] = (offset or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's name
                self._reached[where] = offset or 0
        if found:
            self._recorder.add(Poll(at_ns=now_ns(), reader=self.name, records=tuple(found)))
            self.count += len(found)

    def _behind(self, consumer: Consumer, ends: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """Of these, those that it has not read to their end, which is asked for where it is not known (-1)."""
        behind = {}
        for where, known in ends.items():
            end = known
            if end < 0:
                # Those that read committed data are told the last stable offset.
                with suppress(KafkaException):
                    _, end = consumer.get_watermark_offsets(TopicPartition(*where), timeout=ASK_S)
            if end < 0 or self._reached.get(where, 0) < end:
                behind[where] = end
        return behind


class Looker(Watcher):
    def __init__(self, name: str, path: Path, dsn: str) -> None:
        super().__init__(name, path)
        self._dsn = dsn

    def run(self) -> None:
        deadline_s = inf
        while time.monotonic() < deadline_s:
            try:
                with psycopg.connect(self._dsn, autocommit=True, connect_timeout=5) as connection:
                    while not self.is_over.wait(LOOK_EVERY_S):
                        self._look(connection)
                    self._look(connection)
                    return
            except (psycopg.OperationalError, psycopg.InterfaceError):
                # It is away; the next connection will show what is left of it.
                if self.is_over.wait(LOOK_EVERY_S):
                    deadline_s = min(deadline_s, time.monotonic() + LAST_S)
                    time.sleep(LOOK_EVERY_S)

    def _look(self, connection: psycopg.Connection) -> None:
        found = connection.execute(SUMS.encode()).fetchall()
        sums = {table: Sum(*numbers) for table, *numbers in found}
        self._recorder.add(Look(at_ns=now_ns(), reader=self.name, sums=sums))
        self.count = sum(each.rows for each in sums.values())


def placed(message: Message) -> Placed:
    value = json.loads(message.value() or b"")
    return Placed(f"{message.topic()}-{message.partition()}", message.offset() or 0, value["item"], value["amount"])
