"""Real relay processes, as many as a test wants, on one configuration."""

from __future__ import annotations

import json
import re
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

import grpc
import psycopg
import pytest
import yaml

from oncebox.producer import Producer
from oncebox.v1 import relay_pb2, relay_pb2_grpc
from proof.faults.process import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from oncebox.local import LocalKafka
    from tests.support.coordinator import Coordinators

READY_S = 90.0
GUARD = "oncebox_source integer, oncebox_offset bigint"


class Relays:
    """Instances of one relay. All are killed at the end of the test."""

    def __init__(self, bootstrap_servers: str, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.name = f"relay-{uuid.uuid4().hex[:6]}"
        self.config = folder / f"{self.name}.yaml"
        self.processes: list[ChildProcess] = []
        self._folder = folder
        self.settings: dict[str, Any] = {
            "name": self.name,
            "mode": "partition",
            "kafka": {"bootstrap_servers": bootstrap_servers},
            "postgres": {"dsn": dsn},
            "listen_port": 0,
            "http_port": 0,
            "session_ms": 6000,
            "log_level": "INFO",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()

    def configure(self, tables: Sequence[dict[str, Any]], **settings: Any) -> None:
        self.settings |= {"tables": list(tables)} | settings
        self.config.write_text(yaml.safe_dump(self.settings))

    def start(
        self, *, environment: dict[str, str] | None = None, program: Sequence[str] = ("-m", "relay")
    ) -> ChildProcess:
        process = ChildProcess(
            [sys.executable, *program, str(self.config)],
            log=self._folder / f"{self.name}-{len(self.processes)}.log",
            environment=environment,
        )
        process.start()
        self.processes.append(process)
        process.wait_ready(lambda: process.log_contains(r"serves at .*\n"), timeout_s=READY_S)
        return process

    def rows(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return connection.execute(text, values or None).fetchall()

    def run(self, text: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(text)

    def wait_for(self, text: str, expected: list[tuple[Any, ...]], *, timeout_s: float = 120.0) -> None:
        """Until the query gives this."""

        def found() -> list[tuple[Any, ...]]:
            try:
                return self.rows(text)
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):  # not made yet
                return []

        self.wait_until(lambda: found() == expected, lambda: f"{text}: {found()}", timeout_s=timeout_s)

    def wait_until(self, reached: Callable[[], bool], told: Callable[[], str], *, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > deadline:
                logs = "\n".join(process.log_tail(15) for process in self.processes)
                raise TimeoutError(f"{told()}\n{logs}")
            time.sleep(0.05)


async def commit(one: Coordinators, name: str, topic: str, *values: dict[str, Any]) -> None:
    """One transaction of a writer of its own."""
    async with (
        Producer(one.bootstrap_servers, one.addresses[0], transactional_id=f"{name}-{uuid.uuid4().hex[:6]}") as mine,
        mine.transaction() as transaction,
    ):
        for value in values:
            key = str(value["id"]).encode()
            await transaction.send(topic, json.dumps(value).encode(), key=key)


def call(process: ChildProcess, method: str) -> str:
    """GetStatus, Pause or Resume over gRPC; the state that it answers."""
    found = re.search(r"serves at (\S+), http", process.log.read_text())
    if found is None:
        raise RuntimeError(process.log_tail())
    with grpc.insecure_channel(found[1]) as channel:
        stub = relay_pb2_grpc.RelayStub(channel)
        answer = getattr(stub, method)(getattr(relay_pb2, f"{method}Request")(), timeout=30)
    return relay_pb2.RelayState.Name(answer.state)


@pytest.fixture
def relays(kafka: LocalKafka, database: str, tmp_path: Path) -> Iterator[Relays]:
    with Relays(kafka.bootstrap_servers, database, tmp_path) as all_of_them:
        yield all_of_them
