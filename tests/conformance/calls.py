"""Calls in short form, on the id `a`, and what must come of them: anything else fails the test."""

from coordinator.core.commands import (
    Accepted,
    Blocked,
    Command,
    End,
    Ended,
    ErrorCode,
    Granted,
    Heartbeat,
    InitProducer,
    Prepare,
    Refused,
    Register,
    Registered,
    Timeout,
)
from coordinator.core.records import (
    NOTHING,
    Contents,
    Grant,
    GroupPartition,
    IdState,
    Result,
    Run,
    Slot,
    TopicPartition,
    Written,
    newest_transaction,
)
from coordinator.core.state import TransactionState
from tests.model.desk import Desk

TIMEOUT_MS = 60_000
P0, P1, P2 = (TopicPartition("t", partition) for partition in range(3))
COMMIT, ABORT = Result.COMMITTED, Result.ABORTED


def init(
    *,
    by: str = "one",
    grant: Grant | None = None,
    without_waiting: bool = False,
    keep_prepared: bool = False,
    slots_max: int = 2,
) -> InitProducer:
    return InitProducer(
        transactional_id="a",
        instance=by,
        address=f"{by}:1",
        transaction_timeout_ms=TIMEOUT_MS,
        grant=grant,
        without_waiting=without_waiting,
        keep_prepared=keep_prepared,
        slots_max=slots_max,
    )


def add(grant: Grant, *partitions: TopicPartition, group: str = "", begun_ms_ago: int | None = None) -> Register:
    return Register(
        transactional_id="a",
        grant=grant,
        partitions=frozenset(partitions),
        groups=frozenset({GroupPartition(group, 7)}) if group else frozenset(),
        begun_ms_ago=begun_ms_ago,
    )


def wrote(*partitions: TopicPartition, metadata: bytes = b"") -> Contents:
    """One record each, at offset 0."""
    written = tuple(
        Written(topic=p.topic, partition=p.partition, record_count=1, runs=(Run(0, 1),)) for p in partitions
    )
    return Contents(written=written, metadata=metadata)


def prepare(grant: Grant, contents: Contents = NOTHING) -> Prepare:
    return Prepare(transactional_id="a", grant=grant, contents=contents)


def end(
    grant: Grant,
    result: Result,
    contents: Contents = NOTHING,
    *,
    chain: tuple[TopicPartition, ...] = (),
    decided_is_enough: bool = False,
) -> End:
    return End(
        transactional_id="a",
        grant=grant,
        result=result,
        contents=contents,
        next_partitions=frozenset(chain),
        decided_is_enough=decided_is_enough,
    )


def heartbeat(grant: Grant, begun_ms_ago: int | None = None) -> Heartbeat:
    return Heartbeat(transactional_id="a", grant=grant, begun_ms_ago=begun_ms_ago)


def timeout(grant: Grant) -> Timeout:
    return Timeout(transactional_id="a", number=grant.number)


# --- and what comes of them -----------------------------------------------------------------------------------------


def accepted(desk: Desk, command: Command) -> Accepted:
    decision = desk.call(command)
    assert isinstance(decision, Accepted), decision
    return decision


def granted(desk: Desk, command: Command) -> Grant:
    """The grant that the caller goes on with."""
    reply = accepted(desk, command).reply
    assert isinstance(reply, Granted | Registered), reply
    return reply.grant


def ended(desk: Desk, command: Command) -> Ended:
    reply = accepted(desk, command).reply
    assert isinstance(reply, Ended), reply
    return reply


def following(desk: Desk, command: Command) -> Grant:
    """The grant that comes with the answer to an End."""
    grant = ended(desk, command).next_grant
    assert grant is not None
    return grant


def refused(desk: Desk, command: Command) -> Refused:
    """Refused, and nothing changed."""
    before = state_of(desk) if desk.state.get(command.transactional_id) else None
    written = len(desk.log)
    decision = desk.call(command)
    assert isinstance(decision, Refused), decision
    assert decision.message
    assert desk.state.get(command.transactional_id) == before
    assert len(desk.log) == written
    return decision


def refusal_code(desk: Desk, command: Command) -> ErrorCode:
    return refused(desk, command).code


def held_back(desk: Desk, command: Command) -> Blocked:
    decision = desk.call(command)
    assert isinstance(decision, Blocked), decision
    assert decision.refusal.retriable
    assert decision.refusal.code is ErrorCode.CONCURRENT_TRANSACTIONS
    return decision


def state_of(desk: Desk) -> IdState:
    state = desk.state.get("a")
    assert state is not None
    return state


def newest_state(desk: Desk) -> TransactionState:
    newest = newest_transaction(state_of(desk))
    return newest.state if newest else TransactionState.EMPTY


def state_of_number(desk: Desk, number: int) -> TransactionState | None:
    """Of a transaction that is not complete."""
    return next((t.state for t in state_of(desk).transactions if t.grant.number == number), None)


def owned(desk: Desk, *partitions: TopicPartition, **options: int) -> Grant:
    """A fresh id with an owner and, where partitions are named, an ONGOING transaction."""
    grant = granted(desk, init(**options))  # type: ignore[arg-type]
    if partitions:
        granted(desk, add(grant, *partitions))
    return grant


def set_slot(desk: Desk, epoch: int) -> Grant:
    """The id's present slot, late in its life."""
    state = state_of(desk)
    slot = state.slots[state.slot]
    slots = list(state.slots)
    slots[state.slot] = Slot(producer_id=slot.producer_id, epoch=epoch, since_ms=slot.since_ms)
    desk.plant(state, slots=tuple(slots))
    return Grant(number=state.number, producer_id=slot.producer_id, epoch=epoch)
