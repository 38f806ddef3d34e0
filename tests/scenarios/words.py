"""Decisions and states in few words, for people to read in stories."""

from collections.abc import Iterator, Mapping

from coordinator.core.commands import (
    Accepted,
    Blocked,
    Decision,
    Done,
    Ended,
    Granted,
    NeedsProducerId,
    OutcomeForgotten,
    OutcomeKnown,
    Prepared,
    Refused,
    Registered,
    Reply,
    Undecided,
    Wait,
)
from coordinator.core.owed import owed
from coordinator.core.records import Cause, Grant, IdState, Outcome, Result, TopicPartition, Transaction


def describe_decision(decision: Decision, now_ms: int) -> str:
    match decision:
        case Accepted():
            wait = "" if decision.wait is Wait.NOTHING else f", once {decision.wait.name}"
            return _reply(decision.reply) + wait
        case Refused():
            outcome = f" [{_outcome(decision.outcome)}]" if decision.outcome else ""
            return f"refused {decision.code.name}: {decision.message}{outcome}"
        case Blocked():
            return f"held back {decision.again_at_ms - now_ms} ms: {decision.refusal.message}"
        case NeedsProducerId():
            return "needs a producer id"


def _reply(reply: Reply) -> str:
    match reply:
        case Granted():
            words = [f"granted {_grant(reply.grant)}"]
            if reply.prepared is not None:
                words = [f"gets the PREPARED {_grant(reply.grant)}"]
            if reply.resume_token:
                words.append(f"token {reply.resume_token.decode()}")
            if reply.outcome is not None:
                words.append(_outcome(reply.outcome))
            return ", ".join(words)
        case Registered():
            return f"goes on with {_grant(reply.grant)}"
        case Prepared():
            return f"prepared {reply.transaction.grant.number}"
        case Ended():
            following = f"next {_grant(reply.next_grant)}" if reply.next_grant else "no next grant"
            return f"{_outcome(reply.outcome)}, {following}" + (" registered" if reply.next_registered else "")
        case OutcomeKnown():
            return _outcome(reply.outcome)
        case Undecided():
            state = reply.transaction.state.name if reply.transaction else "EMPTY"
            return f"{reply.grant.number} undecided ({state})"
        case OutcomeForgotten():
            return f"{reply.number} forgotten"
        case Done():
            return "done"


def describe_state(state: IdState, unpaid: Mapping[int, frozenset[TopicPartition]]) -> Iterator[str]:
    slots = " ".join(f"{'*' if i == state.slot else ''}{s.producer_id}:{s.epoch}" for i, s in enumerate(state.slots))
    owner = f"{state.owner.instance} from {state.owner.number_first}"
    token = f", token {state.resume_token.decode()}" if state.resume_token else ""
    yield f"  number {state.number} in {slots}, owner {owner}, {state.origin.name} {state.origin_number}{token}"
    for transaction in state.transactions:
        yield f"  {_transaction(transaction)}"
    for debt in owed(state):
        if debt.number in unpaid:
            kind = "commit" if debt.commit else "abort"
            where = _partitions(unpaid[debt.number])
            marker = f"{kind} marker {debt.producer_id}:{debt.marker_epoch} on {where}"
            yield f"  {debt.number} owes {marker if where else 'its manifest only'}"
    if state.outcomes:
        yield "  outcomes " + ", ".join(_outcome(outcome) for outcome in state.outcomes)


def _transaction(transaction: Transaction) -> str:
    groups = "".join(f" group {group.group_id}" for group in sorted(transaction.groups))
    return f"{transaction.grant.number} {transaction.state.name} {_partitions(transaction.partitions)}{groups}".rstrip()


def _partitions(partitions: frozenset[TopicPartition]) -> str:
    return " ".join(f"p{p.partition}" if p.topic == "t" else f"offsets-{p.partition}" for p in sorted(partitions))


def _grant(grant: Grant) -> str:
    return f"{grant.number} ({grant.producer_id}:{grant.epoch})"


def _outcome(outcome: Outcome) -> str:
    aborted = outcome.result is Result.ABORTED
    cause = f" by {outcome.cause.name}" if aborted and outcome.cause is not Cause.UNSPECIFIED else ""
    return f"{outcome.grant.number} {outcome.result.name}{cause}"
