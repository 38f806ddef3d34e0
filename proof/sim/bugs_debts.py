"""Bugs in what decided transactions owe: which markers, when, in what order. Planted by proof.sim.planted."""

# ruff: noqa: SLF001 - a bug is planted from within

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from coordinator import debts, inbox, serving
from coordinator.core import ending, owed
from coordinator.core.commands import Refused
from coordinator.core.records import IdState, Run, Transaction, Written
from coordinator.core.state import TransactionState
from coordinator.log import pieces
from coordinator.markers import plan as marker_plan
from coordinator.markers.leaders import Leaders
from proof.sim import instance
from proof.sim.planting import changed, put

# --- debts ----------------------------------------------------------------------------------------------------------


def aborts_mark_what_was_reported(stack: ExitStack) -> None:
    real = owed.marked_partitions

    def marked(transaction: Transaction) -> Any:
        return real(changed(transaction, state=TransactionState.PREPARE_COMMIT))

    put(stack, owed, "marked_partitions", marked)
    put(stack, ending, "marked_partitions", marked)


def debts_are_paid_one_by_one(stack: ExitStack) -> None:
    real_pay, real_paid = debts.Debts._pay_markers, debts.Debts._is_paid

    def pay(self: Any, entry: debts.OpenDebt) -> None:
        queue = self.__dict__.setdefault("queue", [])
        queue.append(entry)
        if len(queue) == 1:
            real_pay(self, entry)

    def is_paid(self: Any, entry: debts.OpenDebt) -> None:
        self.queue.remove(entry)
        real_paid(self, entry)
        if self.queue:
            real_pay(self, self.queue[0])

    put(stack, debts.Debts, "_pay_markers", pay)
    put(stack, debts.Debts, "_is_paid", is_paid)


def markers_have_no_deadline(stack: ExitStack) -> None:
    put(stack, instance, "MARKER_TIMEOUT_MS", 1_000_000_000)


def leaders_are_asked_for_once(stack: ExitStack) -> None:
    real = Leaders.refresh

    async def refresh(self: Any, topic: str) -> None:
        if not self.has_heard(topic, 0.0):
            await real(self, topic)

    put(stack, Leaders, "refresh", refresh)


def markers_before_the_decision(stack: ExitStack) -> None:
    real = serving.Serving._append

    async def append(self: Any, batch: inbox.Batch) -> None:
        for _, decision in batch.decided:
            for record in () if isinstance(decision, Refused) else decision.records:
                if isinstance(record, IdState):
                    self.debts.take_on(owed.owed(record))
        await real(self, batch)

    put(stack, serving.Serving, "_append", append)


def markers_before_the_manifest(stack: ExitStack) -> None:
    real_take_on, real_pay = debts.Debts.take_on, debts.Debts._pay_markers

    def take_on(self: Any, decided: Sequence[Any], written: frozenset[Any] = frozenset()) -> None:
        fresh = [debt for debt in decided if debt.number not in self.of(debt.transactional_id)]
        real_take_on(self, decided, written)
        for debt in fresh:
            if debt.commit:
                real_pay(self, self.of(debt.transactional_id)[debt.number])

    def pay(self: Any, entry: debts.OpenDebt) -> None:
        if not entry.debt.commit:
            real_pay(self, entry)

    put(stack, debts.Debts, "take_on", take_on)
    put(stack, debts.Debts, "_pay_markers", pay)


def manifests_name_spans(stack: ExitStack) -> None:
    real = pieces.written

    def written(entry: Written) -> bytes:
        return real(changed(entry, runs=(Run(entry.runs[0].offset_first, entry.runs[-1].offset_next),)))

    put(stack, pieces, "written", written)


def one_marker_is_enough(stack: ExitStack) -> None:
    real = owed.marked_partitions

    def marked(transaction: Transaction) -> Any:
        return frozenset(sorted(real(transaction))[:1])

    put(stack, owed, "marked_partitions", marked)


def markers_always_commit(stack: ExitStack) -> None:
    real = marker_plan.request

    def request(*args: Any, **kwargs: Any) -> Any:
        return [marker._replace(committed=True) for marker in real(*args, **kwargs)]

    put(stack, marker_plan, "request", request)
