"""The states of a transaction and the literal table of what may become of each.

The table is data: `decide` asks it, the diagram in the docs is generated from it, nothing else moves a transaction.
"""

from enum import IntEnum


class TransactionState(IntEnum):
    EMPTY = 1
    ONGOING = 2
    PREPARED = 3
    PREPARE_COMMIT = 4
    PREPARE_ABORT = 5
    COMPLETE_COMMIT = 6
    COMPLETE_ABORT = 7
    DEAD = 8


class Event(IntEnum):
    # A partition or a consumer group is registered with the transaction (also by chaining).
    REGISTER = 1
    # The owner is about to decide together with another system.
    PREPARE = 2
    COMMIT = 3
    # By the owner, a timeout, a newer instance or an administrator.
    ABORT = 4
    # Manifest and markers are all acknowledged.
    PAID = 5
    # Idle for too long.
    EXPIRE = 6


_S, _E = TransactionState, Event

TRANSITIONS: dict[tuple[TransactionState, Event], TransactionState] = {
    (_S.EMPTY, _E.REGISTER): _S.ONGOING,
    # A commit of metadata alone (a resume token) touches no partition.
    (_S.EMPTY, _E.COMMIT): _S.PREPARE_COMMIT,
    # Withdrawn before anything was registered: nothing is owed.
    (_S.EMPTY, _E.ABORT): _S.COMPLETE_ABORT,
    (_S.EMPTY, _E.EXPIRE): _S.DEAD,
    (_S.ONGOING, _E.REGISTER): _S.ONGOING,
    (_S.ONGOING, _E.PREPARE): _S.PREPARED,
    (_S.ONGOING, _E.COMMIT): _S.PREPARE_COMMIT,
    (_S.ONGOING, _E.ABORT): _S.PREPARE_ABORT,
    (_S.PREPARED, _E.PREPARE): _S.PREPARED,
    (_S.PREPARED, _E.COMMIT): _S.PREPARE_COMMIT,
    (_S.PREPARED, _E.ABORT): _S.PREPARE_ABORT,
    (_S.PREPARE_COMMIT, _E.PAID): _S.COMPLETE_COMMIT,
    (_S.PREPARE_ABORT, _E.PAID): _S.COMPLETE_ABORT,
}

# What one step may make of each, by the table; to stay as it is is always possible.
REACHABLE: dict[TransactionState, frozenset[TransactionState]] = {
    state: frozenset({state, *(after for (before, _), after in TRANSITIONS.items() if before is state)}) for state in _S
}

# Decided, with debts: markers or a manifest are still to be written.
INDEBTED = frozenset({_S.PREPARE_COMMIT, _S.PREPARE_ABORT})
