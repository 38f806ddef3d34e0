"""A client that writes to a database, in a process of its own: one transaction of outbox rows after another, each
written down before it is tried and when its outcome is known. Ends on SIGTERM after the operation in hand.

`python -m proof.chaos.database_client DSN NAME INCARNATION SEED HISTORY`
"""

import json
import signal
import sys
import threading
from pathlib import Path
from random import Random

import psycopg

from oncebox.outbox import INSERT, event
from proof.chaos.history import ABORTED, COMMITTED, UNKNOWN, Commit, Invoke, Recorder, Told, now_ns
from proof.chaos.workload import CIRCLE, LEAVES_EVERY, transfer, write_of

THINK_S = 0.05
RETRY_S = 0.2
CONNECT_S = 5


class DatabaseClient:
    def __init__(self, name: str, random: Random, recorder: Recorder) -> None:
        self._name = name
        self._random = random
        self._recorder = recorder
        self._count = 0
        self.is_over = threading.Event()

    def work(self, dsn: str) -> None:
        while not self.is_over.is_set():
            try:
                with psycopg.connect(dsn, connect_timeout=CONNECT_S) as connection:
                    print("begins", flush=True)
                    while not self.is_over.wait(THINK_S):
                        self._operate(connection)
            except psycopg.Error as error:
                print(f"starts again: {error}", flush=True)
                self.is_over.wait(RETRY_S)

    def _operate(self, connection: psycopg.Connection) -> None:
        self._count += 1
        op = f"{self._name}/{self._count}"
        rows = transfer(CIRCLE, op, self._random)
        self._recorder.add(
            Invoke(
                at_ns=now_ns(),
                op=op,
                client=self._name,
                transactional_id=self._name,
                number=self._count,
                writes=tuple(map(write_of, rows)),
            )
        )
        asked = False
        try:
            for row in rows:
                payload = json.loads(row.value or b"")
                connection.execute(INSERT, event(row.topic, (row.key or b"").decode(), "Transfer", payload))
            if self._random.randrange(LEAVES_EVERY) == 0:
                connection.rollback()
                self._tell(op, ABORTED)
                return
            self._recorder.add(Commit(at_ns=now_ns(), op=op, number=self._count))
            asked = True
            connection.commit()
        except psycopg.Error as error:
            # The rows themselves will tell.
            self._tell(op, UNKNOWN if asked else ABORTED, error=f"{type(error).__name__}: {error}")
            raise
        self._tell(op, COMMITTED)

    def _tell(self, op: str, outcome: str, *, error: str = "") -> None:
        self._recorder.add(Told(at_ns=now_ns(), op=op, outcome=outcome, by=self._name, error=error))


def main(dsn: str, name: str, incarnation: str, seed: str, path: str) -> None:
    with Recorder(Path(path)) as recorder:
        client = DatabaseClient(f"{name}.{incarnation}", Random(f"{seed} {name} {incarnation}"), recorder)
        signal.signal(signal.SIGTERM, lambda *_: client.is_over.set())
        client.work(dsn)


if __name__ == "__main__":
    main(*sys.argv[1:])
