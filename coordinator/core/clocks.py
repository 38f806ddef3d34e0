"""How long open transactions may last. Volatile: clocks start anew when a partition changes its leader.

Not begun (nothing written yet, as far as its owner says): any message of the owner resets the clock, as long as its
producer id is young enough to be begun with.
Begun: the transaction timeout counts from the begin; heartbeats may extend it up to a maximum.
"""

from collections.abc import Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from coordinator.core.commands import Command, Heartbeat, Register, Timeout
from coordinator.core.records import IdState, newest_transaction
from coordinator.core.state import TransactionState


class Clock(Struct, frozen=True, kw_only=True):
    number: int
    since_ms: int
    begun: bool
    deadline_ms: int


def tick(
    clock: Clock | None,
    state: IdState,
    *,
    now_ms: int,
    begun_ms_ago: int | None = None,
    extend: bool = False,
    timeout_max_ms: int = 0,
    unbegun_age_max_ms: int | None = None,
) -> Clock | None:
    """The clock after a message of the owner (or a fresh record); None where no timer may end the transaction."""
    newest = newest_transaction(state)
    if newest is None or newest.state is not TransactionState.ONGOING:
        return None
    number, timeout_ms = newest.grant.number, state.transaction_timeout_ms
    if clock is not None and clock.number != number:
        clock = None
    if clock is None or not clock.begun:
        if begun_ms_ago is None:
            deadline_ms = now_ms + timeout_ms
            if unbegun_age_max_ms is not None:
                deadline_ms = min(deadline_ms, state.slots[state.slot].since_ms + unbegun_age_max_ms)
            return Clock(number=number, since_ms=now_ms, begun=False, deadline_ms=deadline_ms)
        # It had not begun when this clock was last set: a wrong age, or a take-over, must not end it early.
        earliest_ms = clock.since_ms if clock is not None else newest.started_at_ms
        since_ms = min(max(now_ms - begun_ms_ago, earliest_ms), now_ms)
        clock = Clock(number=number, since_ms=since_ms, begun=True, deadline_ms=since_ms + timeout_ms)
    if not extend:
        return clock
    latest_ms = clock.since_ms + max(timeout_max_ms, timeout_ms)
    return replace(clock, deadline_ms=max(clock.deadline_ms, min(now_ms + timeout_ms, latest_ms)))


class Clocks:
    """The clocks of one log partition's open transactions."""

    def __init__(self, timeout_max_ms: int, unbegun_age_max_ms: int | None = None) -> None:
        """`unbegun_age_max_ms`: of the producer id of one that is registered and not begun, however often its owner
        gives a sign of life.
        """
        self._timeout_max_ms = timeout_max_ms
        self._unbegun_age_max_ms = unbegun_age_max_ms
        self._clocks: dict[str, Clock] = {}
        # No deadline is earlier: most looks for what has expired need no more than this.
        self._earliest_ms: float = inf

    def tick(self, state: IdState, command: Command | None, now_ms: int) -> None:
        """After a message of the owner, a record, or (command None) a take-over, which starts the clock anew."""
        told = command if isinstance(command, Heartbeat | Register) else None
        clock = tick(
            self._clocks.get(state.transactional_id) if command is not None else None,
            state,
            now_ms=now_ms,
            begun_ms_ago=told.begun_ms_ago if told is not None else None,
            extend=isinstance(command, Heartbeat) and command.extend,
            timeout_max_ms=self._timeout_max_ms,
            # A new leader does not know what has begun: only its owner can say that it has not.
            unbegun_age_max_ms=self._unbegun_age_max_ms if told is not None else None,
        )
        if clock is None:
            self._clocks.pop(state.transactional_id, None)
        else:
            self._clocks[state.transactional_id] = clock
            self._earliest_ms = min(self._earliest_ms, clock.deadline_ms)

    def is_expired(self, transactional_id: str, number: int, now_ms: int) -> bool:
        clock = self._clocks.get(transactional_id)
        return clock is not None and clock.number == number and clock.deadline_ms <= now_ms

    def expired(self, now_ms: int) -> Sequence[Timeout]:
        if now_ms < self._earliest_ms:
            return ()
        self._earliest_ms = min((clock.deadline_ms for clock in self._clocks.values()), default=inf)
        return [
            Timeout(transactional_id=transactional_id, number=clock.number)
            for transactional_id, clock in self._clocks.items()
            if clock.deadline_ms <= now_ms
        ]
