"""InitProducer: who may take an id over or go on with it, and what becomes of what was left open."""

from msgspec.structs import replace

from coordinator.core.commands import Accepted, Decision, ErrorCode, Granted, InitProducer, Refused, Wait
from coordinator.core.ending import decide_newest
from coordinator.core.grants import (
    Context,
    ProducerIds,
    grant_next,
    identify,
    limit_slots,
    new_slot,
    outcome_of,
    refuse_fenced,
    was_found_prepared,
)
from coordinator.core.records import (
    NOTHING,
    Cause,
    Grant,
    IdState,
    Origin,
    Outcome,
    Owner,
    Result,
    Transaction,
    grant_of,
    newest_transaction,
)
from coordinator.core.state import TransactionState


def init_new(command: InitProducer, context: Context, ids: ProducerIds) -> Decision:
    number = context.number_floor + 1
    state = IdState(
        transactional_id=command.transactional_id,
        slots=(new_slot(context, ids),),
        number=number,
        slot=0,
        origin=Origin.INIT,
        origin_number=0,
        owner=_owner(command, context, number),
        transaction_timeout_ms=command.transaction_timeout_ms,
        slots_max=command.slots_max,
        transactions=(),
        outcomes=(),
        resume_token=b"",
        updated_at_ms=context.now_ms,
    )
    return Accepted(
        reply=Granted(grant=grant_of(state), resume_token=b""), records=(state,), producer_ids_used=ids.used
    )


def _owner(command: InitProducer, context: Context, number: int) -> Owner:
    return Owner(
        instance=command.instance,
        address=command.address,
        since_ms=context.now_ms,
        number_first=number,
        cause=Cause.NEWER_INSTANCE,
    )


def init(state: IdState, command: InitProducer, context: Context, ids: ProducerIds) -> Decision:
    wait = Wait.NOTHING if command.without_waiting else Wait.ALL_IS_PAID
    # Checked before anything is aborted: a zombie's stale grant must not end the newer owner's transaction (R10).
    if command.grant is not None:
        refusal_or_repeat = _check_claim(state, command.grant, command.instance, wait)
        if refusal_or_repeat is not None:
            return refusal_or_repeat
    newest = newest_transaction(state)
    if newest is not None and newest.state is TransactionState.PREPARED:
        return _init_prepared(state, newest, command, context)
    by_owner = command.grant is not None
    cause = Cause.OWNER if by_owner else Cause.NEWER_INSTANCE
    ended = decide_newest(state, Result.ABORTED, cause, NOTHING, context)
    moved = grant_next(
        limit_slots(ended, command.slots_max), context, ids, origin=Origin.INIT, stay=not command.without_waiting
    )
    after = replace(
        moved,
        owner=state.owner if by_owner else _owner(command, context, moved.number),
        origin_number=command.grant.number if command.grant else 0,
        transaction_timeout_ms=command.transaction_timeout_ms,
    )
    outcome = outcome_of(after, command.grant.number) if command.grant else None
    return Accepted(
        reply=Granted(grant=grant_of(after), resume_token=after.resume_token, outcome=outcome),
        records=(after,),
        wait=wait,
        producer_ids_used=ids.used,
    )


def _check_claim(state: IdState, grant: Grant, instance: str, wait: Wait) -> Decision | None:
    """None: the grant is the owner's newest, as far as it can know. Else a refusal, or the same answer again."""
    identity = identify(state, grant)
    if isinstance(identity, Refused) and identity.code is not ErrorCode.OUTCOME_EXPIRED:
        return identity
    outcome = identity if isinstance(identity, Outcome) else None
    if grant.number < state.owner.number_first and not _is_finder(state, grant, instance, outcome):
        return refuse_fenced(state, outcome)
    if identity is None:
        return None
    if state.origin is Origin.END and grant.number >= state.origin_number:
        # The answer that brought a newer grant may have been lost.
        return None
    if state.origin is Origin.INIT and grant.number == state.origin_number and newest_transaction(state) is None:
        return Accepted(
            reply=Granted(grant=grant_of(state), resume_token=state.resume_token, outcome=outcome), wait=wait
        )
    return Refused(
        code=ErrorCode.PRODUCER_FENCED,
        message=f"grant {grant.number} has been followed by grant {state.number}; only the newest may be continued",
        owner=state.owner,
        outcome=outcome,
    )


def _is_finder(state: IdState, grant: Grant, instance: str, outcome: Outcome | None) -> bool:
    """Who found a PREPARED one holds the same grant as whoever prepared it: their names tell them apart."""
    return instance != "" and instance == state.owner.instance and was_found_prepared(state, grant.number, outcome)


def _init_prepared(state: IdState, newest: Transaction, command: InitProducer, context: Context) -> Decision:
    if not command.keep_prepared:
        return Refused(
            code=ErrorCode.INVALID_TXN_STATE,
            message=f"transaction {newest.grant.number} is PREPARED and waits for a decision: decide it with End, or "
            "call InitProducer with keep_prepared",
        )
    reply = Granted(grant=newest.grant, resume_token=state.resume_token, prepared=newest)
    if command.grant is not None:
        return Accepted(reply=reply)
    # The former owner may be alive and holds the same grant: either may decide, but what follows is granted to neither,
    # only to the next Init: of the finder, by its name, or of somebody newer. Else both would write under one epoch.
    owner = _owner(command, context, newest.grant.number + 1)
    return Accepted(reply=reply, records=(replace(state, owner=owner, updated_at_ms=context.now_ms),))
