"""A client in a process of its own: one transaction after another, each written down before it is tried and when its
outcome is known. Ends on SIGTERM after the operation in hand, or with FENCED when another one has its id.

`python -m proof.chaos.client SERVERS COORDINATORS WORKLOAD TRANSACTIONAL_ID INCARNATION SEED HISTORY`
"""

import asyncio
import signal
import sys
import time
from pathlib import Path
from random import Random

from oncebox.bulk import Outgoing
from oncebox.errors import FatalError, OnceboxError, OutcomeExpiredError, ProducerFencedError
from oncebox.producer import Producer, ProducerSettings, Transaction
from oncebox.v1 import transaction_pb2
from oncebox.writer_settings import WriterSettings
from proof.chaos.history import ABORTED, COMMITTED, UNKNOWN, Commit, Invoke, Placed, Recorder, Told, now_ns, read
from proof.chaos.workload import LEAVES_EVERY, PASSER_BY, records, write_of

FENCED = 3
TRANSACTION_TIMEOUT_MS = 6_000
# Who gives a request up soon has a late one still under way when the transaction has long been decided.
WRITER = WriterSettings(request_timeout_ms=2_000)
SETTINGS = ProducerSettings(
    transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
    call_timeout_ms=10_000,
    writer=WRITER,
)
LEAVES = "leaves it open"
# More than one: they have different coordinators.
PASSER_BY_IDS = 4
THINK_S = 0.02
RETRY_S = 0.1
# Longer than any transaction may live: then the next one is begun, and it is asked for behind that.
SETTLE_S = 3 * TRANSACTION_TIMEOUT_MS / 1000


class ChangedItsMindError(Exception):
    """In the middle of an operation."""


class Client:
    def __init__(
        self,
        workload: str,
        name: str,
        transactional_id: str,
        random: Random,
        recorder: Recorder,
        unsettled: list[tuple[str, int]],
    ) -> None:
        self._workload = workload
        self._name = name
        self._transactional_id = transactional_id
        self._random = random
        self._recorder = recorder
        # Operations, with their numbers, that nobody was told the outcome of: a former process's, and then its own.
        self._unsettled = unsettled
        self._count = 0
        self.is_over = asyncio.Event()

    async def work(self, bootstrap_servers: str, coordinators: str) -> None:
        """Takes the id once, and keeps it: to take it again would be to fence a successor."""
        producer = await self._open(bootstrap_servers, coordinators)
        print("begins", flush=True)
        try:
            while not self.is_over.is_set():
                try:
                    await self._ask(producer)
                    await self._operate(producer)
                    await asyncio.sleep(THINK_S)
                except FatalError:
                    raise
                except OnceboxError as error:
                    print(f"goes on after: {error}", flush=True)
                    await asyncio.sleep(RETRY_S)
        finally:
            await producer.stop()

    async def _open(self, bootstrap_servers: str, coordinators: str) -> Producer:
        while True:
            producer = Producer(
                bootstrap_servers, coordinators, transactional_id=self._transactional_id, settings=SETTINGS
            )
            try:
                await producer.start()
            except FatalError:
                raise
            except OnceboxError as error:
                print(f"starts again: {error}", flush=True)
                await asyncio.sleep(RETRY_S)
            else:
                return producer

    async def _ask(self, producer: Producer) -> None:
        """At once: an abort is told only while it is among the newest outcomes of its id."""
        for op, number in self._unsettled[:]:
            try:
                outcome = _definite(await producer.outcome_of(number))
            except OutcomeExpiredError as error:
                self._tell(op, UNKNOWN, error=str(error))
            else:
                if outcome is None:
                    continue  # the next begin() settles it
                self._tell(op, outcome)
            self._unsettled.remove((op, number))

    async def _operate(self, producer: Producer) -> None:
        transaction = await producer.begin()
        self._count += 1
        op = f"{self._name}/{self._count}"
        # By its own clock, as other clients do it: a broker may refuse what comes from far ahead.
        timestamp_ms = int(time.time() * 1000)
        found = records(self._workload, op, self._random)
        outgoing = [record._replace(timestamp_ms=timestamp_ms) for record in found]
        self._recorder.add(
            Invoke(
                at_ns=now_ns(),
                op=op,
                client=self._name,
                transactional_id=self._transactional_id,
                number=transaction.number,
                writes=tuple(map(write_of, outgoing)),
            )
        )
        try:
            await self._transact(transaction, op, outgoing)
        except ChangedItsMindError:
            await self._settle(transaction, op)
        except OnceboxError as error:
            self._tell(op, UNKNOWN, error=f"{type(error).__name__}: {error}")
            await self._settle(transaction, op, error if isinstance(error, FatalError) else None)

    async def _transact(self, transaction: Transaction, op: str, outgoing: list[Outgoing]) -> None:
        receipt = await transaction.send_many(outgoing)
        # All is written before it is decided how this ends: what is aborted stands in the topics, too.
        await transaction.flush()
        if self._workload == PASSER_BY:
            print(LEAVES, flush=True)
            await asyncio.Event().wait()
        if self._random.randrange(LEAVES_EVERY) == 0:
            raise ChangedItsMindError
        self._recorder.add(Commit(at_ns=now_ns(), op=op, number=transaction.number))
        await transaction.commit(wait=self._random.choice(("complete", "decided")))
        places = tuple(
            Placed(f"{place.topic}-{place.partition}", place.offset, write.item, write.amount)
            for place, write in zip(receipt.offsets(), map(write_of, outgoing), strict=True)
        )
        self._tell(op, COMMITTED, places=places)

    async def _settle(self, transaction: Transaction, op: str, fatal: FatalError | None = None) -> None:
        """Aborts what is open, and asks until the outcome is known: also one that has been fenced is told."""
        deadline_s = time.monotonic() + SETTLE_S
        outcome: str | None = None
        error: OnceboxError | None = None
        while outcome is None and time.monotonic() < deadline_s:
            try:
                if fatal is None and transaction.is_open and await transaction.abort() is None:
                    self._tell(op, ABORTED, unnumbered=True)
                    return
                outcome = _definite(await transaction.outcome())
            except FatalError as failure:
                if fatal is not None:
                    break
                error = fatal = failure
            except OutcomeExpiredError as failure:
                error = failure
                break
            except OnceboxError as failure:
                error = failure
                await asyncio.sleep(RETRY_S)
            else:
                await asyncio.sleep(0 if outcome else RETRY_S)
        self._tell(op, outcome or UNKNOWN, error=str(error or ""))
        if outcome is None:
            self._unsettled.append((op, transaction.number))
        if fatal is not None:
            raise fatal

    def _tell(
        self,
        op: str,
        outcome: str,
        *,
        error: str = "",
        unnumbered: bool = False,
        places: tuple[Placed, ...] = (),
    ) -> None:
        self._recorder.add(
            Told(
                at_ns=now_ns(),
                op=op,
                outcome=outcome,
                by=self._name,
                error=error,
                unnumbered=unnumbered,
                places=places,
            )
        )


def _definite(outcome: transaction_pb2.Outcome) -> str | None:
    return {transaction_pb2.COMMITTED: COMMITTED, transaction_pb2.ABORTED: ABORTED}.get(outcome.result)


def unsettled_of(histories: list[Path]) -> list[tuple[str, int]]:
    """Operations, with their numbers, that nobody was told the outcome of."""
    numbers: dict[str, int] = {}
    settled: set[str] = set()
    for path in histories:
        for line in read(path):
            event = line.event
            if isinstance(event, Invoke | Commit):
                numbers[event.op] = event.number
            elif isinstance(event, Told) and event.outcome != UNKNOWN:
                settled.add(event.op)
    return [(op, number) for op, number in numbers.items() if op not in settled]


async def _pass_by(name: str, seed: str, recorder: Recorder, servers: str, coordinators: str) -> None:
    """Until it is killed: each of its ids leaves a transaction open."""
    names = [f"{name}-{number}" for number in range(1, PASSER_BY_IDS + 1)]
    clients = [Client(PASSER_BY, each, each, Random(f"{seed} {each}"), recorder, []) for each in names]
    await asyncio.gather(*(client.work(servers, coordinators) for client in clients))


async def main(
    servers: str, coordinators: str, workload: str, name: str, incarnation: str, seed: str, path: str
) -> None:
    former = [each for each in Path(path).parent.glob(f"{name}.*.jsonl") if each != Path(path)]
    with Recorder(Path(path)) as recorder:
        if workload == PASSER_BY:
            await _pass_by(name, seed, recorder, servers, coordinators)
            return
        random = Random(f"{seed} {name} {incarnation}")
        client = Client(workload, f"{name}.{incarnation}", name, random, recorder, unsettled_of(former))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, client.is_over.set)
        await client.work(servers, coordinators)


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except ProducerFencedError as error:
        print(f"fenced: {error}", flush=True)
        sys.exit(FENCED)
