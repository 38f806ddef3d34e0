"""Answers that wait until what they speak of is paid."""

import asyncio
from collections.abc import Sequence

from coordinator.calls import Answer
from coordinator.core.commands import Accepted, Ended, ErrorCode, Granted, OutcomeKnown, Refused, Wait
from coordinator.core.records import TopicPartition
from coordinator.debts import Debts, OpenDebt
from coordinator.inbox import Call


class Answers:
    def __init__(self, debts: Debts, *, marker_wait_ms: int) -> None:
        self._debts = debts
        self._marker_wait_ms = marker_wait_ms
        self._waiting: dict[Call, Accepted] = {}

    def answer(self, call: Call, accepted: Accepted) -> None:
        """Now, or once the debts that the reply waits for are paid."""
        if call.is_over:
            # Its caller gave up during the append, and what it would wait for may last.
            return
        reply = accepted.reply
        debts = self._debts.of(call.command.transactional_id)
        if accepted.wait is Wait.ENDED_IS_PAID and isinstance(reply, Ended):
            entry = debts.get(reply.outcome.grant.number)
            if entry is not None and not entry.paid:
                self._wait_for([entry], call, accepted)
                # Past the bound it answers that it is decided, with what is still owed.
                bound = asyncio.get_running_loop().time() + self._marker_wait_ms / 1000
                call.at_deadline(lambda: self._resolve(call, accepted), not_after=bound)
                return
        elif accepted.wait is Wait.ALL_IS_PAID and isinstance(reply, Granted):
            unpaid = [e for number, e in debts.items() if number < reply.grant.number and not e.paid]
            if unpaid:
                self._wait_for(unpaid, call, accepted)
                return
        self._resolve(call, accepted)

    def stop(self, refusal: Refused) -> None:
        """Leadership is over. A durable end is answered with what is owed; only the waiting ends here."""
        for call, accepted in list(self._waiting.items()):
            if isinstance(accepted.reply, Ended):
                self._resolve(call, accepted)
            else:
                call.resolve(refusal)
        self._waiting.clear()

    def time_out(self, call: Call) -> None:
        self._forget(call)
        if call.held is not None:
            call.resolve(call.held)
            return
        command = call.command
        still = sorted(self._owed(command.transactional_id))
        detail = f"; markers are owed to {', '.join(f'{t}:{p}' for t, p in still[:5])}" if still else ""
        call.resolve(
            Refused(
                code=ErrorCode.REQUEST_TIMED_OUT,
                message=f"no answer in time for {type(command).__name__} of {command.transactional_id!r}{detail}; "
                "GetOutcome tells what became of the transaction",
                retriable=True,
            )
        )

    def _wait_for(self, entries: Sequence[OpenDebt], call: Call, accepted: Accepted) -> None:
        self._waiting[call] = accepted
        left = len(entries)

        def one_is_paid() -> None:
            nonlocal left
            left -= 1
            if left == 0 and call in self._waiting:
                self._resolve(call, accepted)

        for entry in entries:
            entry.waiters[call] = one_is_paid

    def _forget(self, call: Call) -> None:
        if self._waiting.pop(call, None) is not None:
            # A debt may last, and whoever waits for it comes again and again.
            for entry in self._debts.of(call.command.transactional_id).values():
                entry.waiters.pop(call, None)

    def _resolve(self, call: Call, accepted: Accepted) -> None:
        self._forget(call)
        transactional_id = call.command.transactional_id
        reply = accepted.reply
        still: frozenset[TopicPartition] = frozenset()
        complete = True
        if isinstance(reply, Ended | OutcomeKnown | Granted) and reply.outcome is not None:
            entry = self._debts.of(transactional_id).get(reply.outcome.grant.number)
            if entry is not None and not entry.paid:
                still, complete = frozenset(entry.remaining), False
        in_all = self._owed(transactional_id) if isinstance(reply, Granted) else frozenset()
        call.resolve(Answer(reply=reply, owed=still, complete=complete, owed_in_all=in_all))

    def _owed(self, transactional_id: str) -> frozenset[TopicPartition]:
        return frozenset(p for entry in self._debts.of(transactional_id).values() for p in entry.remaining)
