"""A coordinator's log full of idle ids, written as a leader writes it, but faster than clients could bring it about."""

import asyncio
import secrets
import uuid
from collections.abc import Iterator
from ipaddress import IPv4Address
from itertools import islice
from random import Random
from zlib import crc32

from coordinator.cluster import OwnTopics, ensure_topics
from coordinator.core.records import Cause, Grant, IdState, Origin, Outcome, Owner, Result, Slot
from coordinator.log import codec
from coordinator.log.kafka import KafkaStore
from coordinator.log.lead import Appender, take_over, writer_of
from coordinator.log.port import Kind
from coordinator.log.replay import Replay
from oncebox.wire import KafkaSettings, Wire

DAY_MS = 24 * 3_600_000
OUTCOMES = 5  # as many as an id's record remembers
# An id's value does not name it: this many different ones, dealt out at random, are as good as millions.
VALUES = 10_000
BATCH_RECORDS = 3_000


def idle_state(rng: Random, now_ms: int) -> IdState:
    """An id that has committed many transactions with two slots and was last used some time in the last six days."""
    number, producer_id = rng.randrange(100, 1_000_000), rng.randrange(1_000, 10_000_000)
    updated_at_ms = now_ms - rng.randrange(6 * DAY_MS)
    epoch = 2 * rng.randrange(10, 16_000)
    ended_ms = sorted(updated_at_ms - rng.randrange(60_000) for _ in range(OUTCOMES))
    return IdState(
        transactional_id="",
        slots=tuple(
            Slot(producer_id=producer_id + slot, epoch=epoch, since_ms=updated_at_ms - rng.randrange(DAY_MS))
            for slot in (0, 1)
        ),
        number=number,
        slot=number % 2,
        origin=Origin.END,
        origin_number=number - 1,
        owner=Owner(
            instance=uuid.UUID(int=rng.getrandbits(128)).hex,
            address=f"ipv4:{IPv4Address(rng.getrandbits(32))}:{rng.randrange(32_768, 61_000)}",
            since_ms=updated_at_ms - rng.randrange(DAY_MS),
            number_first=number - rng.randrange(100),
            cause=Cause.NEWER_INSTANCE,
        ),
        transaction_timeout_ms=60_000,
        slots_max=2,
        transactions=(),
        outcomes=tuple(
            Outcome(
                grant=Grant(number=past, producer_id=producer_id + past % 2, epoch=epoch - number + past),
                result=Result.COMMITTED,
                cause=Cause.UNSPECIFIED,
                decided_at_ms=ended_ms[past - number + OUTCOMES],
            )
            for past in range(number - OUTCOMES, number)
        ),
        resume_token=b"",
        updated_at_ms=updated_at_ms,
    )


def names_by_partition(count: int, partitions: int) -> list[list[str]]:
    """Made-up transactional ids, each in the log partition that leads it."""
    names: list[list[str]] = [[] for _ in range(partitions)]
    for number in range(count):
        name = f"orders-service-{number:07d}"
        names[crc32(name.encode()) % partitions].append(name)
    return names


async def write(bootstrap_servers: str, own: OwnTopics, *, count: int, now_ms: int, seed: int = 1) -> None:
    """Creates the topics and takes every partition over as a leader that has long gone when somebody comes to read."""
    rng = Random(seed)
    values = [codec.encode_id(idle_state(rng, now_ms)) for _ in range(min(count, VALUES))]
    settings = KafkaSettings(bootstrap_servers=bootstrap_servers)
    async with Wire(settings) as wire:
        await ensure_topics(wire, settings, own)
        store = KafkaStore(wire, settings, log_topic=own.log, feed_topic=own.feed)
        try:
            for partition, names in enumerate(names_by_partition(count, own.partitions)):
                records = iter([(codec.id_key(name), rng.choice(values)) for name in names])
                await _write_partition(store, partition, records)
        finally:
            await store.close()


async def _write_partition(store: KafkaStore, partition: int, records: Iterator[tuple[bytes, bytes]]) -> None:
    won = await take_over(
        store,
        partition,
        instance="bench",
        address="",
        nonce=lambda: secrets.token_bytes(16),
        replay=Replay(),
    )
    writer = writer_of(partition, won.leader.generation, won.leader.epoch)
    log = Appender(store, Kind.LOG, partition, writer, 1)
    while batch := list(islice(records, BATCH_RECORDS)):
        await log.append(batch)
        await asyncio.sleep(0)
