"""Copies the topic of the lists with oncebox.transform, partition by partition, until it is told to stop. A transform
that ends without a reason is written down as stuck, and another one goes on.

`python -m proof.chaos.copier SERVERS COORDINATORS NAME HISTORY`
"""

import asyncio
import signal
import sys
from pathlib import Path

import oncebox
from oncebox import ProducerSettings, Transaction, TransformSettings
from oncebox.errors import RetriableError
from oncebox.reader import Record
from proof.chaos.client import WRITER
from proof.chaos.history import Recorder, Stuck, now_ns
from proof.chaos.workload import COPIES, COPY_RECORDS_MAX, LISTS

GROUP = "copiers"
SESSION_MS = 6_000
RETRY_S = 0.5
PRODUCER = ProducerSettings(transaction_timeout_ms=10_000, writer=WRITER)


class Copier:
    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name = name
        self._recorder = recorder
        self._has_copied = False
        self.stop = asyncio.Event()

    async def copy(self, record: Record, transaction: Transaction) -> None:
        self._has_copied = True
        await transaction.send(COPIES, record.value, key=record.key, partition=record.partition)

    async def work(self, servers: str, coordinators: str) -> None:
        settings = TransformSettings(
            transaction_records=COPY_RECORDS_MAX,
            producer=PRODUCER,
            consumer={"group.instance.id": self._name, "session.timeout.ms": SESSION_MS},
        )
        while not self.stop.is_set():
            self._has_copied = False
            try:
                await oncebox.transform(
                    LISTS,
                    GROUP,
                    self.copy,
                    kafka=servers,
                    coordinators=coordinators.split(","),
                    transactional_id=self._name,
                    stop=self.stop,
                    settings=settings,
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs into the history
                self.judge(error)
                await asyncio.sleep(RETRY_S)
            else:
                self.judge(None)

    def judge(self, error: Exception | None) -> None:
        """Nobody may be there when it starts. Once it copies it has to go on by itself, whatever comes."""
        why = f"{type(error).__name__}: {error}" if error is not None else "without an error"
        print(f"ended: {why}", flush=True)
        is_expected = isinstance(error, RetriableError) and not self._has_copied
        if not is_expected and not self.stop.is_set():
            self._recorder.add(Stuck(at_ns=now_ns(), what=f"the transform of {self._name} ended: {why}"))


async def main(servers: str, coordinators: str, name: str, path: str) -> None:
    with Recorder(Path(path)) as recorder:
        copier = Copier(name, recorder)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, copier.stop.set)
        print("serves at no port", flush=True)
        await copier.work(servers, coordinators)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
