"""Decides what a command means for an id: records to append and the reply that follows, or a refusal.

Reads state, never changes it. Order of checks: malformed, unknown id, decided number, fenced, the table in state.py.
"""

from msgspec.structs import replace

from coordinator.core.commands import (
    Abort,
    Accepted,
    Blocked,
    Command,
    Complete,
    Decision,
    Done,
    End,
    Ended,
    ErrorCode,
    Expire,
    ForceFence,
    GetOutcome,
    Heartbeat,
    InitProducer,
    NeedsProducerId,
    OutcomeForgotten,
    OutcomeKnown,
    Prepare,
    Prepared,
    Refused,
    Register,
    Registered,
    Timeout,
    TopicIds,
    Undecided,
    Wait,
)
from coordinator.core.ending import check_contents, decide_newest, register, registration_obstacle, same_contents
from coordinator.core.grants import (
    SLOTS_MAX,
    Context,
    OutOfProducerIdsError,
    ProducerIds,
    debt_in_slot,
    grant_next,
    has_debts_to_wait_for,
    identify,
    is_too_old,
    new_slot,
    outcome_of,
    refuse_decided,
    settle,
    with_new_producer_id,
)
from coordinator.core.initialise import init, init_new
from coordinator.core.records import (
    NOTHING,
    Cause,
    Contents,
    IdState,
    NumberFloor,
    Origin,
    Outcome,
    Owner,
    Result,
    Tombstone,
    TopicState,
    grant_of,
    newest_transaction,
)
from coordinator.core.state import TRANSITIONS, Event, TransactionState
from coordinator.core.topics import is_older_than, news, refuse_changed, with_news


def decide(state: IdState | None, command: Command, context: Context) -> Decision:
    """The decision on `command`, given the id's state (None: the log does not know the id)."""
    malformed = _malformed(command)
    if malformed is not None:
        return Refused(code=ErrorCode.INVALID_REQUEST, message=malformed)
    ids = ProducerIds(context.producer_ids)
    try:
        if state is None:
            return _decide_unknown(command, context, ids)
        return _decide_known(settle(state, context), command, context, ids)
    except OutOfProducerIdsError:
        return NeedsProducerId()


def _malformed(command: Command) -> str | None:
    """What no state could make sense of."""
    match command:
        case Register(partitions=partitions, groups=groups) if not partitions and not groups:
            return "no partition and no group is named"
        case InitProducer(slots_max=slots_max) if not 1 <= slots_max <= SLOTS_MAX:
            return f"an id has 1 to {SLOTS_MAX} slots, not {slots_max}"
        case End(result=Result.UNDECIDED):
            return "the result must be COMMITTED or ABORTED"
        case _:
            return None


def _decide_unknown(command: Command, context: Context, ids: ProducerIds) -> Decision:
    match command:
        case InitProducer(grant=None):
            return init_new(command, context, ids)
        case Timeout() | Complete() | Expire():
            return Accepted(reply=Done())
        case _:
            return Refused(
                code=ErrorCode.INVALID_PRODUCER_ID_MAPPING,
                message=f"the transactional id {command.transactional_id!r} is unknown: it never existed or has "
                "expired; call InitProducer without a grant",
            )


def _decide_known(state: IdState, command: Command, context: Context, ids: ProducerIds) -> Decision:
    match command:
        case InitProducer():
            return init(state, command, context, ids)
        case Register():
            return _register(state, command, context, ids)
        case Prepare():
            return _prepare(state, command, context)
        case End():
            return _end(state, command, context, ids)
        case Heartbeat():
            return _heartbeat(state, command)
        case GetOutcome():
            return _get_outcome(state, command)
        case Abort():
            return _abort(state, command, context, ids)
        case ForceFence():
            return _force_fence(state, command, context, ids)
        case Timeout():
            return _timeout(state, command, context, ids)
        case Complete():
            # What is paid is completed before every decision.
            return Accepted(reply=Done(), records=(state,))
        case Expire():
            return _expire(state, command, context)


# --- the life of a transaction --------------------------------------------------------------------------------------


def _renewed(state: IdState, outcome: Outcome, *, begun: bool) -> bool:
    """Whether the newest grant takes the place of one that ended before its owner wrote anything under it."""
    unused = outcome.cause is Cause.UNSPECIFIED or (outcome.cause is Cause.TIMEOUT and not begun)
    number_first = max(state.origin_number, state.owner.number_first)
    return unused and state.origin is Origin.END and outcome.grant.number >= number_first


def _register(state: IdState, command: Register, context: Context, ids: ProducerIds) -> Decision:
    identity = identify(state, command.grant)
    if isinstance(identity, Refused):
        return identity
    if identity is not None and not _renewed(state, identity, begun=command.begun_ms_ago is not None):
        return refuse_decided(state, identity)
    newest = newest_transaction(state)
    found = news(command.partitions, command.topic_ids, context)
    context = with_news(command.partitions, found, context)
    if newest is not None:
        if (newest.state, Event.REGISTER) not in TRANSITIONS:
            return Refused(
                code=ErrorCode.INVALID_TXN_STATE,
                message=f"transaction {newest.grant.number} is {newest.state.name}; only End is possible now",
            )
        refusal = refuse_changed(state, ((p.topic, b"") for p in command.partitions), command.topic_ids, context)
        if refusal is not None:
            return refusal
        if command.partitions <= newest.partitions and command.groups <= newest.groups:
            return Accepted(reply=Registered(grant=newest.grant))
    elif is_too_old(slot := state.slots[state.slot], context) or is_older_than(slot, command.partitions, context):
        state = _skip(state, command, context, ids)
    elif (debt := debt_in_slot(state)) is not None:
        patience_ends_ms = debt.decided_at_ms + context.limits.patience_ms
        # One decided in the future was decided by another clock: nobody waits for that hour to come.
        if debt.decided_at_ms <= context.now_ms < patience_ends_ms:
            return _blocked(f"transaction {debt.grant.number} is still being completed", patience_ends_ms)
        state = _skip(state, command, context, ids)
    obstacle = registration_obstacle(state, command.partitions, command.groups, context)
    if obstacle is not None:
        return _blocked(obstacle, context.now_ms + context.limits.patience_ms)
    after = register(state, command.partitions, command.groups, context)
    return Accepted(reply=Registered(grant=grant_of(after)), records=(*found, after), producer_ids_used=ids.used)


def _skip(state: IdState, command: Register, context: Context, ids: ProducerIds) -> IdState:
    """The slot cannot be had: this number ends unused, the next one gets a producer id of its own."""
    skipped = decide_newest(state, Result.ABORTED, Cause.UNSPECIFIED, NOTHING, context)
    slots = list(skipped.slots)
    slots[skipped.slot] = new_slot(context, ids)
    return replace(
        skipped,
        slots=tuple(slots),
        number=state.number + 1,
        origin=Origin.END,
        origin_number=command.grant.number,
    )


def _blocked(obstacle: str, again_at_ms: int) -> Blocked:
    return Blocked(
        again_at_ms=again_at_ms,
        refusal=Refused(
            code=ErrorCode.CONCURRENT_TRANSACTIONS, message=f"{obstacle}; send the call again", retriable=True
        ),
    )


def _prepare(state: IdState, command: Prepare, context: Context) -> Decision:
    identity = identify(state, command.grant)
    if isinstance(identity, Refused):
        return identity
    if identity is not None:
        return refuse_decided(state, identity)
    newest = newest_transaction(state)
    if newest is None:
        return Refused(code=ErrorCode.INVALID_TXN_STATE, message="nothing is registered: there is nothing to prepare")
    if newest.state is TransactionState.PREPARED:
        if not same_contents(newest.contents, command.contents):
            return Refused(
                code=ErrorCode.INVALID_TXN_STATE,
                message=f"transaction {newest.grant.number} is PREPARED with other contents",
            )
        return Accepted(reply=Prepared(transaction=newest))
    # First whether the topics are still the same: offsets of two topics under one name make no sense together.
    refusal = _refuse_changed(state, command.contents, command.topic_ids, context)
    refusal = refusal or check_contents(newest, command.contents)
    if refusal is not None:
        return refusal
    prepared = replace(newest, state=TRANSITIONS[newest.state, Event.PREPARE], contents=command.contents)
    after = replace(state, transactions=(*state.transactions[:-1], prepared), updated_at_ms=context.now_ms)
    return Accepted(reply=Prepared(transaction=prepared), records=(after,))


def _end(state: IdState, command: End, context: Context, ids: ProducerIds) -> Decision:
    wait = Wait.NOTHING if command.decided_is_enough else Wait.ENDED_IS_PAID
    identity = identify(state, command.grant)
    if isinstance(identity, Refused):
        return identity
    newest = newest_transaction(state)
    if identity is not None:
        return _ended_already(state, command, identity, wait)
    # What an abort says of its contents counts for nothing, least of all its metadata: that is no resume token.
    contents = NOTHING
    if command.result is Result.COMMITTED:
        contents = command.contents
        if newest is not None and newest.state is TransactionState.PREPARED:
            if command.contents != NOTHING and not same_contents(newest.contents, command.contents):
                return Refused(
                    code=ErrorCode.INVALID_REQUEST, message="a PREPARED transaction has its contents already"
                )
            contents = newest.contents
            refusal = None
        else:
            refusal = _refuse_changed(state, contents, command.topic_ids, context) or check_contents(newest, contents)
        if refusal is not None:
            return refusal
        if not context.feed_is_available:
            refusal = Refused(
                code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
                message="the feed takes no manifests: nothing is decided; send the call again",
                retriable=True,
            )
            return Blocked(again_at_ms=context.now_ms + context.limits.patience_ms, refusal=refusal)
        obstacle = registration_obstacle(state, frozenset(), frozenset(), context) if newest is None else None
        if obstacle is not None:
            return _blocked(obstacle, context.now_ms + context.limits.patience_ms)
    ended = decide_newest(state, command.result, Cause.OWNER, contents, context)
    after = grant_next(ended, context, ids, origin=Origin.END)
    # False of a PREPARED one that another instance has taken over (it holds the same grant).
    is_owner = command.grant.number >= state.owner.number_first
    chains = is_owner and bool(command.next_partitions or command.next_groups)
    registered = (
        chains
        and debt_in_slot(after) is None
        and registration_obstacle(after, command.next_partitions, command.next_groups, context) is None
    )
    if chains and not registered and context.may_wait and has_debts_to_wait_for(state):
        patience_ends_ms = context.now_ms + context.limits.chain_patience_ms
        return _blocked("older transactions are still being completed", patience_ends_ms)
    found: tuple[TopicState, ...] = ()
    if registered:
        found = news(command.next_partitions, command.topic_ids, context)
        context = with_news(command.next_partitions, found, context)
        if is_older_than(after.slots[after.slot], command.next_partitions, context):
            after = with_new_producer_id(after, context, ids)
        after = register(after, command.next_partitions, command.next_groups, context)
    return Accepted(
        reply=Ended(
            outcome=after.outcomes[-1], next_grant=grant_of(after) if is_owner else None, next_registered=registered
        ),
        records=(*found, after),
        wait=wait,
        producer_ids_used=ids.used,
    )


def _refuse_changed(state: IdState, contents: Contents, topic_ids: TopicIds, context: Context) -> Refused | None:
    written = [(entry.topic, entry.topic_id) for entry in contents.written if entry.record_count]
    return refuse_changed(state, written, topic_ids, context)


def _ended_already(state: IdState, command: End, outcome: Outcome, wait: Wait) -> Decision:
    if outcome.result is not command.result:
        return refuse_decided(state, outcome)
    if command.grant.number < state.owner.number_first:
        return Accepted(reply=Ended(outcome=outcome, next_grant=None), wait=wait)
    newest = newest_transaction(state)
    registered = (
        bool(command.next_partitions or command.next_groups)
        and newest is not None
        and command.next_partitions <= newest.partitions
        and command.next_groups <= newest.groups
    )
    return Accepted(reply=Ended(outcome=outcome, next_grant=grant_of(state), next_registered=registered), wait=wait)


def _heartbeat(state: IdState, command: Heartbeat) -> Decision:
    identity = identify(state, command.grant)
    if isinstance(identity, Refused):
        return identity
    if identity is not None and not _renewed(state, identity, begun=command.begun_ms_ago is not None):
        return refuse_decided(state, identity)
    return Accepted(reply=Registered(grant=grant_of(state)))


def _get_outcome(state: IdState, command: GetOutcome) -> Decision:
    if command.number > state.number or command.number < 1:
        return Refused(
            code=ErrorCode.INVALID_REQUEST,
            message=f"number {command.number} has not been granted; the newest is {state.number}",
        )
    outcome = outcome_of(state, command.number)
    if outcome is not None:
        return Accepted(reply=OutcomeKnown(outcome=outcome))
    if command.number == state.number:
        return Accepted(reply=Undecided(grant=grant_of(state), transaction=newest_transaction(state)))
    return Accepted(reply=OutcomeForgotten(number=command.number))


# --- by others than the owner ---------------------------------------------------------------------------------------


def _abort_newest(state: IdState, cause: Cause, context: Context, ids: ProducerIds) -> IdState:
    ended = decide_newest(state, Result.ABORTED, cause, NOTHING, context)
    moved = grant_next(ended, context, ids, origin=Origin.END)
    if state.origin is Origin.END:
        # Chained, and the answer lost: the owner may not have heard of this number, and goes on from the one before.
        return replace(moved, origin_number=state.origin_number)
    return moved


def _timeout(state: IdState, command: Timeout, context: Context, ids: ProducerIds) -> Decision:
    newest = newest_transaction(state)
    if newest is None or newest.grant.number != command.number or newest.state is not TransactionState.ONGOING:
        return Accepted(reply=Done())
    after = _abort_newest(state, Cause.TIMEOUT, context, ids)
    return Accepted(reply=Done(), records=(after,), producer_ids_used=ids.used)


def _abort(state: IdState, command: Abort, context: Context, ids: ProducerIds) -> Decision:
    outcome = outcome_of(state, command.number)
    if outcome is not None:
        if outcome.result is Result.COMMITTED:
            return refuse_decided(state, outcome)
        return Accepted(reply=OutcomeKnown(outcome=outcome))
    newest = newest_transaction(state)
    if newest is None or newest.grant.number != command.number:
        return Refused(
            code=ErrorCode.INVALID_TXN_STATE,
            message=f"transaction {command.number} is not open; "
            + (f"{newest.grant.number} is" if newest else "no transaction of this id is"),
        )
    after = _abort_newest(state, Cause.ADMINISTRATOR, context, ids)
    return Accepted(reply=OutcomeKnown(outcome=after.outcomes[-1]), records=(after,), producer_ids_used=ids.used)


def _force_fence(state: IdState, command: ForceFence, context: Context, ids: ProducerIds) -> Decision:
    newest = newest_transaction(state)
    if newest is not None and newest.state is TransactionState.PREPARED and not command.abort_prepared:
        return Refused(
            code=ErrorCode.INVALID_TXN_STATE,
            message=f"transaction {newest.grant.number} is PREPARED: its other system may have committed. Resolve it, "
            "or fence with abort_prepared",
        )
    moved = _abort_newest(state, Cause.ADMINISTRATOR, context, ids)
    owner = Owner(
        instance=command.administrator,
        address="",
        since_ms=context.now_ms,
        number_first=moved.number,
        cause=Cause.ADMINISTRATOR,
    )
    after = replace(moved, owner=owner, origin=Origin.INIT, origin_number=0)
    return Accepted(reply=OutcomeKnown(outcome=after.outcomes[-1]), records=(after,), producer_ids_used=ids.used)


def _expire(state: IdState, command: Expire, context: Context) -> Decision:
    # A resume token or a debt keeps an id: forgetting either would lose something.
    idle = state.updated_at_ms < command.idle_since_before_ms
    if not idle or state.transactions or state.resume_token:
        return Accepted(reply=Done())
    floor = NumberFloor(number_floor=max(state.number, context.number_floor))
    return Accepted(reply=Done(), records=(floor, Tombstone(transactional_id=state.transactional_id)))
