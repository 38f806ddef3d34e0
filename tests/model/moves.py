"""All that can happen in the world, as a table: each move, how often it is made, and what its arguments may be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from coordinator.core.commands import Abort, Complete, End, Expire, ForceFence, GetOutcome, Timeout
from coordinator.core.grants import EPOCH_MAX
from coordinator.core.records import Grant, Result, TopicPartition
from tests.model.clients import Produce
from tests.model.desk import HOUR_MS
from tests.model.world import Message, World

Partitions = frozenset[TopicPartition]
PARTITIONS = tuple(TopicPartition("t", partition) for partition in range(3))

NAMES = ("one", "one", "one", "two", "two", "three", "four")
IDS = ("a", "a", "b")
SETS = tuple(frozenset(chosen) for size in range(3) for chosen in combinations(PARTITIONS, size))
METADATA = (b"", b"", b"token-1", b"token-2")
FATES = ("now", "now", "now", "unanswered", "unanswered", "later", "twice", "append fails")
FLAGS = (False, True)
SLOTS = (1, 2, 2, 4)
PICKS = tuple(range(8))
EPOCHS = (0, 0, EPOCH_MAX - 6, EPOCH_MAX - 2, EPOCH_MAX)


def work(
    world: World,
    *,
    name: str,
    partitions: Partitions,
    chain: Partitions,
    how: str,
    metadata: bytes,
    steps: int,
    fate: str,
) -> None:
    """What a client does all day: register, write, end. Only the last step meets its fate."""
    client = world.clients[name]
    for step in range(steps):
        last = fate if step == steps - 1 else "now"
        if world.is_waiting(client):
            return
        if client.grant is None or (client.request and how != "commit"):
            # An answer never came: it makes sure, or (below) asks again.
            keep = how == "prepare"
            init(world, name=name, claim=True, without_waiting=False, keep=keep, slots_max=2, fate=last)
        elif client.must_abort or (client.ending and client.prepared is None):
            end(world, name=name, commit=False, metadata=b"", chain=chain, decided=True, fate=last)
        elif not client.registered and not client.ending:
            register(world, name=name, partitions=partitions, group=False, begun=True, fate=last)
        elif not client.acknowledged and not client.ending:
            for partition in client.writable():
                world.write(client, partition, late=False)
        elif how == "prepare" and client.prepared is None:
            prepare(world, name=name, metadata=metadata, fate=last)
        else:
            end(world, name=name, commit=how != "abort", metadata=metadata, chain=chain, decided=True, fate=last)


def init(world: World, *, name: str, claim: bool, without_waiting: bool, keep: bool, slots_max: int, fate: str) -> None:
    client = world.clients[name]
    command = client.init(claim=claim, without_waiting=without_waiting, keep_prepared=keep, slots_max=slots_max)
    world.send(client, command, fate)


def register(world: World, *, name: str, partitions: Partitions, group: bool, begun: bool, fate: str) -> None:
    client = world.clients[name]
    wanted = partitions if partitions or group else frozenset(PARTITIONS[:1])
    world.send(client, client.register(wanted, group=group, begun=begun), fate)


def prepare(world: World, *, name: str, metadata: bytes, fate: str) -> None:
    client = world.clients[name]
    world.send(client, client.prepare(metadata), fate)


def end(world: World, *, name: str, commit: bool, metadata: bytes, chain: Partitions, decided: bool, fate: str) -> None:
    client = world.clients[name]
    world.send(client, client.end(commit=commit, metadata=metadata, chain=chain, decided=decided), fate)


def write(world: World, *, name: str, pick: int, late: bool) -> None:
    client = world.clients[name]
    partitions = client.writable()
    if partitions:
        world.write(client, partitions[pick % len(partitions)], late=late)


def stray(world: World, *, name: str, what: str, fate: str) -> None:
    client = world.clients[name]
    if what == "heartbeat":
        world.send(client, client.heartbeat(), fate)
    else:
        # Killed and started again: it remembers nothing; what it sent may still arrive.
        client.take(None)
        client.request = 0


def forge(world: World, *, name: str, off: tuple[int, int, int]) -> None:
    """A grant that nobody was given ends nothing."""
    held = world.clients[name].grant
    if held is not None:
        number, producer_id, epoch = off
        grant = Grant(number=held.number + number, producer_id=held.producer_id + producer_id, epoch=held.epoch + epoch)
        if grant not in world.ledger.handed_out.values():
            tid = world.clients[name].transactional_id
            world.decide(End(transactional_id=tid, grant=grant, result=Result.ABORTED))


def deliver_late(world: World, *, pick: int, again: bool) -> None:
    late: Sequence[Message | Produce] = [*world.late_messages, *world.late_produces]
    if not late:
        return
    match late[pick % len(late)]:
        case Message() as message:
            if not again:
                world.late_messages.remove(message)
            world.deliver(message)
        case Produce() as produce:
            world.late_produces.remove(produce)
            world.broker.produce(
                produce.grant.producer_id, produce.grant.epoch, produce.sequence, produce.partition, produce.value
            )


def lose_patience(world: World, *, pick: int) -> None:
    if world.parked:
        world.stop_waiting(world.parked[pick % len(world.parked)])


def keep_house(world: World, *, tid: str, what: str) -> None:
    """By the coordinator itself, for time passes."""
    book = world.ledger.books.get(tid)
    match what:
        case "timeout":
            world.decide(Timeout(transactional_id=tid, number=book.number if book else 1))
        case "complete":
            world.decide(Complete(transactional_id=tid))
        case _:
            idle_since_before_ms = world.desk.now_ms + 1 if what == "expire" else 0
            world.decide(Expire(transactional_id=tid, idle_since_before_ms=idle_since_before_ms))


def administrate(world: World, *, tid: str, back: int, what: str) -> None:
    book = world.ledger.books.get(tid)
    number = book.number - back if book else back
    match what:
        case "outcome":
            world.decide(GetOutcome(transactional_id=tid, number=number))
        case "abort":
            world.decide(Abort(transactional_id=tid, number=number))
        case _:
            prepared = what == "fence prepared"
            world.decide(ForceFence(transactional_id=tid, administrator="root", abort_prepared=prepared))


def pay(world: World, *, pick: int, fate: str) -> None:
    debts = world.debts()
    if debts:
        world.pay(*debts[pick % len(debts)], fate)


def drop(world: World, *, pick: int) -> None:
    debts = world.debts()
    if debts:
        world.drop(*debts[pick % len(debts)])


def recreate(world: World) -> None:
    world.recreate()


def pay_all(world: World) -> None:
    world.pay_all()


def repeat_markers(world: World) -> None:
    world.repeat_markers()


def crash(world: World, *, compact: bool) -> None:
    world.crash(compact=compact)


def advance(world: World, *, milliseconds: int) -> None:
    world.desk.advance(milliseconds)
    world.desk.producer_ids_at_hand = 0


@dataclass(frozen=True, slots=True)
class Move:
    make: Callable[..., None]
    weight: int
    choices: Mapping[str, Sequence[Any]]


HOW = ("commit", "commit", "abort", "prepare")
MOVES = (
    Move(
        work,
        20,
        {"name": NAMES, "partitions": SETS, "chain": SETS, "how": HOW, "metadata": METADATA}
        | {"steps": range(1, 7), "fate": FATES},
    ),
    Move(
        init,
        4,
        {"name": NAMES, "claim": FLAGS, "without_waiting": FLAGS, "keep": FLAGS, "slots_max": SLOTS, "fate": FATES},
    ),
    Move(register, 5, {"name": NAMES, "partitions": SETS, "group": FLAGS, "begun": FLAGS, "fate": FATES}),
    Move(prepare, 2, {"name": NAMES, "metadata": METADATA, "fate": FATES}),
    Move(
        end, 6, {"name": NAMES, "commit": FLAGS, "metadata": METADATA, "chain": SETS, "decided": FLAGS, "fate": FATES}
    ),
    Move(write, 5, {"name": NAMES, "pick": PICKS, "late": FLAGS}),
    Move(stray, 2, {"name": NAMES, "what": ("heartbeat", "heartbeat", "heartbeat", "restart"), "fate": FATES}),
    Move(forge, 1, {"name": NAMES, "off": ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 0, 2), (0, 0, -2), (2, 2, 2))}),
    Move(deliver_late, 6, {"pick": PICKS, "again": FLAGS}),
    Move(lose_patience, 2, {"pick": PICKS}),
    Move(keep_house, 5, {"tid": IDS, "what": ("timeout", "timeout", "timeout", "complete", "expire", "expire busy")}),
    Move(
        administrate,
        2,
        {"tid": IDS, "back": range(-1, 6), "what": ("outcome", "outcome", "abort", "abort", "fence", "fence prepared")},
    ),
    Move(pay, 8, {"pick": PICKS, "fate": ("now", "now", "now", "unanswered", "later")}),
    Move(pay_all, 5, {}),
    Move(repeat_markers, 4, {}),
    Move(drop, 1, {"pick": PICKS}),
    Move(recreate, 2, {}),
    Move(crash, 3, {"compact": FLAGS}),
    Move(advance, 3, {"milliseconds": (1, 700, 1_000, 60_000, 12 * HOUR_MS)}),
)
