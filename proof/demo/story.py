"""Tells the story: parts up, transfers, a coordinator, a relay and a client killed, books compared, Spark's verdict."""

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from oncebox.local import LocalKafka, LocalPostgres
from oncebox.local.kafka import QUICK_START
from oncebox.producer import Producer
from proof.demo import books, parts
from proof.demo.audit import Audit, audit
from proof.demo.bank import TOPICS, Tally, work
from proof.demo.parts import DemoFailedError
from proof.faults.process import ChildProcess

FOLDER = Path(".oncebox/demo")
FEED = "oncebox.commits"
# The client that is killed: what it had committed by then only the topics know.
VICTIM = "bank-victim"
CATCH_UP_S = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the story plays on."""

    kafka: LocalKafka
    dsn: str
    coordinators: Sequence[ChildProcess]
    addresses: list[str]
    relays: Sequence[ChildProcess]
    client: ChildProcess


def tell(*, transfers: int, clients: int, folder: Path = FOLDER) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    with ExitStack() as running:
        stage = _set_up(running, folder, say)
        reader = running.enter_context(books.Reader(stage.dsn))
        tally = asyncio.run(_run(stage, transfers, clients, say))
        say("counting in Kafka, with a stock consumer that reads committed data only")
        found = audit(stage.kafka.bootstrap_servers, FEED)
        _verdict(tally, found, say)
        books.await_rows(stage.dsn, set(found.journal), CATCH_UP_S)
        say(f"PostgreSQL has caught up: {len(found.journal)} rows in each of {', '.join(TOPICS)}, the same transfers")
        if reader.torn is not None:
            raise DemoFailedError(f"a reader of PostgreSQL saw half a transfer: {reader.torn}")
        say(f"a reader asked PostgreSQL {reader.looks} times meanwhile: never half a transfer")
        _reconcile(stage, folder, say)
    say(f"all parts are stopped; logs are in {folder}")


def _set_up(running: ExitStack, folder: Path, say: Say) -> Stage:
    say("starting a real Kafka (3 brokers) and a real PostgreSQL")
    kafka = running.enter_context(LocalKafka(folder / "kafka", brokers=3, jvm_options=[QUICK_START]))
    postgres = running.enter_context(LocalPostgres(folder / "postgres"))
    servers, dsn = kafka.bootstrap_servers, postgres.dsn
    say(f"Kafka at {servers}, PostgreSQL at {postgres.host}:{postgres.port}")
    parts.create_topics(servers)
    coordinators = [running.enter_context(parts.coordinator(servers, folder, number)) for number in (1, 2)]
    addresses = [parts.address_of(process) for process in coordinators]
    say(f"two coordinators at {' and '.join(addresses)}")
    relays = [running.enter_context(parts.relay(servers, dsn, folder, 1))]
    # The first one works once its tables are there.
    books.await_tables(dsn, parts.READY_S)
    relays.append(running.enter_context(parts.relay(servers, dsn, folder, 2)))
    parts.address_of(relays[1])
    say(f"two relays copy {', '.join(TOPICS)} to PostgreSQL: one works, one stands by")
    client = running.enter_context(parts.client(servers, addresses, folder, VICTIM))
    client.wait_ready(lambda: client.log_contains("begins"), timeout_s=parts.READY_S)
    return Stage(kafka=kafka, dsn=dsn, coordinators=coordinators, addresses=addresses, relays=relays, client=client)


async def _run(stage: Stage, transfers: int, clients: int, say: Say) -> Tally:
    tally = Tally()
    say(f"{clients} clients make {transfers} transfers, each one transaction over {', '.join(TOPICS)}")
    names = [f"bank-{number}" for number in range(clients)]
    producers = [Producer(stage.kafka.bootstrap_servers, stage.addresses, transactional_id=name) for name in names]
    for producer in producers:
        await producer.start()
    share = range(-(-transfers // clients))
    begun = time.monotonic()
    working = [
        asyncio.create_task(work(producer, name, share, Random(name), tally))
        for producer, name in zip(producers, names, strict=True)
    ]
    await _until(tally, transfers // 4, working)
    say(f"after {tally.done} transfers a coordinator is killed (SIGKILL)")
    killed, before = time.monotonic(), tally.done
    await asyncio.to_thread(stage.coordinators[0].kill)
    await _until(tally, before + 2 * clients, working)
    say(f"the other one has taken over: all clients go on after {time.monotonic() - killed:.1f} s")
    await _until(tally, transfers // 2, working)
    say(f"after {tally.done} transfers the working relay is killed, and a client in the middle of its transfers")
    await asyncio.to_thread(stage.relays[0].kill)
    await asyncio.to_thread(stage.client.kill)
    # Whoever starts with the same id fences the dead one, and aborts what it left open.
    successor = Producer(stage.kafka.bootstrap_servers, stage.addresses, transactional_id=VICTIM)
    producers.append(successor)
    await successor.start()
    working.append(asyncio.create_task(work(successor, f"{VICTIM}-again", range(10), Random(0), tally)))
    await asyncio.gather(*working)
    rate = tally.done / (time.monotonic() - begun)
    say(f"{len(tally.committed)} committed, {len(tally.aborted)} aborted half-way, {rate:.0f} transactions/s in all")
    for producer in producers:
        await producer.stop()
    return tally


async def _until(tally: Tally, done: int, working: "list[asyncio.Task[None]]") -> None:
    while tally.done < done and not all(task.done() for task in working):  # noqa: ASYNC110 - for a person's eyes only
        await asyncio.sleep(0.01)


def _verdict(tally: Tally, found: Audit, say: Say) -> None:
    # The killed client's own are known from the topics only: all or nothing of each.
    killed = {transfer for transfer in found.journal if transfer.startswith(f"{VICTIM}-")} - tally.committed
    committed = tally.committed | killed
    problems = [
        f"{name}: {len(committed - set(seen))} lost, {len(set(seen) - committed)} never committed, "
        f"{sum(seen.values()) - len(seen)} doubled"
        for name, seen in (("debits", found.debits), ("credits", found.credits), ("journal", found.journal))
        if set(seen) != committed or sum(seen.values()) != len(seen)
    ]
    if found.debited != found.credited:
        problems.append(f"{found.debited} left the accounts and {found.credited} arrived")
    if found.manifests != len(committed):
        problems.append(f"{found.manifests} commits are in the feed")
    if problems:
        raise DemoFailedError("; ".join(problems))
    say(f"each of {len(committed)} transfers ({len(killed)} of the killed client) stands once in all three topics")
    say(f"{found.debited} left the accounts, {found.credited} arrived: EXACTLY ONCE")


def _reconcile(stage: Stage, folder: Path, say: Say) -> None:
    say("Spark compares the coordinator's log, the topics and the tables")
    command = [str(Path(sys.executable).with_name("oncebox")), "reconcile", "run", "--full"]
    command += ["--bootstrap-servers", stage.kafka.bootstrap_servers, "--dsn", stage.dsn]
    command += ["--report-folder", str(folder / "report")]
    with (folder / "reconcile.log").open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    sentence, _, rest = done.stdout.partition("\n")
    if done.returncode != 0:
        raise DemoFailedError(f"the reconciliation ended with {done.returncode}: {done.stdout or log.name}")
    say(f"RECONCILED ({sentence}), 0 findings")
    say(rest.strip())
