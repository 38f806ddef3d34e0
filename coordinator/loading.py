"""Taking a log partition over and reading what it holds: all that is needed to serve it."""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.core.apply import PartitionState
from coordinator.core.invariants import check
from coordinator.core.owed import Debt, owed
from coordinator.debts import Part
from coordinator.log import codec
from coordinator.log.lead import Appender, take_over, writer_of
from coordinator.log.port import Kind, Store
from coordinator.log.replay import Replay
from oncebox.v1 import log_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    leader: log_pb2.LeaderState
    ids: PartitionState
    log: Appender
    feed: Appender
    feed_offset_next: int
    # In the order in which they were decided, with the parts of their manifests that stand in the feed already.
    debts: tuple[Debt, ...]
    written: frozenset[Part]


async def load(
    store: Store,
    partition: int,
    *,
    instance: str,
    address: str,
    nonce: Callable[[], bytes],
    accept_lost_log: bool,
) -> Loaded:
    replay = Replay()
    won = await take_over(
        store,
        partition,
        instance=instance,
        address=address,
        nonce=nonce,
        replay=replay,
        accept_lost_log=accept_lost_log,
    )
    ids = replay.finish()
    debts: list[Debt] = []
    for state in ids.active.values():
        check(state)
        # How long they waited for us nobody knows.
        debts.extend(replace(debt, is_old=True) for debt in owed(state))
    scan_first = min(
        (d.transaction.feed_offset_first for d in debts if d.commit and not d.transaction.feed_offset_next),
        default=won.feed_offset_next,
    )
    writer = writer_of(partition, won.leader.generation, won.leader.epoch)
    return Loaded(
        leader=won.leader,
        ids=ids,
        # Both go on after the leader record, which had sequence 0.
        log=Appender(store, Kind.LOG, partition, writer, 1, won.log_offset_next),
        feed=Appender(store, Kind.FEED, partition, writer, 1),
        feed_offset_next=won.feed_offset_next,
        debts=tuple(sorted(debts, key=lambda debt: debt.decision)),
        written=await _manifests(store, partition, scan_first, won.feed_offset_next),
    )


async def _manifests(store: Store, partition: int, offset_first: int, offset_next: int) -> frozenset[Part]:
    written: set[Part] = set()
    async for chunk in store.read(Kind.FEED, partition, offset_first, offset_next):
        for entry in chunk:
            record = codec.parse_feed(entry.value)
            if record.WhichOneof("record") == "manifest":
                manifest = record.manifest
                written.add((manifest.transactional_id, manifest.number, manifest.part))
    return frozenset(written)
