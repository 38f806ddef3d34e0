"""Bugs in what the core decides: who owns what, which epoch is next, when time is up. Planted by proof.sim.planted."""

# ruff: noqa: SLF001 - a bug is planted from within

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

from coordinator.core import clocks, decide, grants, initialise, topics
from coordinator.core.commands import Accepted, Granted, OutcomeForgotten, Refused
from coordinator.core.ending import decide_newest as real_decide_newest
from coordinator.core.grants import Context
from coordinator.core.records import Cause, Grant, IdState, Outcome, grant_of, newest_transaction
from coordinator.core.state import TransactionState
from coordinator.markers import plan as marker_plan
from oncebox import atomic_commit
from proof.sim.planting import changed, put, without_invariants

# --- who may do what ------------------------------------------------------------------------------------------------


def number_is_not_looked_at(stack: ExitStack) -> None:
    real = grants.identify

    def identify(state: IdState, grant: Grant) -> Refused | Outcome | None:
        if grant.producer_id == grant_of(state).producer_id:
            return None
        return real(state, grant)

    put(stack, decide, "identify", identify)


def init_does_not_raise(stack: ExitStack) -> None:
    real = initialise.init

    def init(state: IdState, command: Any, context: Context, ids: Any) -> Any:
        if command.grant is None and newest_transaction(state) is None:
            after = changed(state, updated_at_ms=context.now_ms)
            return Accepted(reply=Granted(grant=grant_of(state), resume_token=state.resume_token), records=(after,))
        return real(state, command, context, ids)

    put(stack, decide, "init", init)


def timeouts_fence(stack: ExitStack) -> None:
    real = grants.refuse_decided

    def refuse(state: IdState, outcome: Outcome) -> Refused:
        return grants.refuse_fenced(state, outcome) if outcome.cause is Cause.TIMEOUT else real(state, outcome)

    put(stack, decide, "refuse_decided", refuse)


def claims_are_not_checked(stack: ExitStack) -> None:
    put(stack, initialise, "_check_claim", lambda _state, _grant, _instance, _wait: None)


def token_comes_with_completion(stack: ExitStack) -> None:
    def decide_newest(state: IdState, *args: Any) -> IdState:
        return changed(real_decide_newest(state, *args), resume_token=state.resume_token)

    def settle(state: IdState, context: Context) -> IdState:
        token = state.resume_token
        for transaction in state.transactions:
            if transaction.grant.number in context.paid:
                token = transaction.contents.metadata or token
        return changed(grants.settle(state, context), resume_token=token)

    put(stack, decide, "decide_newest", decide_newest)
    put(stack, initialise, "decide_newest", decide_newest)
    put(stack, decide, "settle", settle)


def numbers_start_anew(stack: ExitStack) -> None:
    real = initialise.init_new
    put(stack, decide, "init_new", lambda command, context, ids: real(command, changed(context, number_floor=0), ids))


# --- what is prepared -------------------------------------------------------------------------------------------------


def the_database_is_only_looked_at(stack: ExitStack) -> None:
    def settle_once(database: Any, _database_id: str, values: dict[str, object]) -> Generator[Any, Any, str]:
        rows = yield database.execute("result", values)
        return rows[0][0] if rows else "aborted"

    put(stack, atomic_commit, "_settle_once", settle_once)


def fencing_ends_what_is_prepared(stack: ExitStack) -> None:
    real = decide._force_fence

    def force_fence(state: IdState, command: Any, *args: Any) -> Any:
        return real(state, changed(command, abort_prepared=True), *args)

    put(stack, decide, "_force_fence", force_fence)


def timeouts_end_what_is_prepared(stack: ExitStack) -> None:
    real_tick, real_timeout = clocks.tick, decide._timeout

    put(stack, clocks, "tick", lambda clock, state, **told: real_tick(clock, _as_ongoing(state), **told))
    put(stack, decide, "_timeout", lambda state, *args: real_timeout(_as_ongoing(state), *args))


def inits_end_what_is_prepared(stack: ExitStack) -> None:
    real = initialise.init

    def init(state: IdState, command: Any, context: Context, ids: Any) -> Any:
        return real(state if command.keep_prepared else _as_ongoing(state), command, context, ids)

    put(stack, decide, "init", init)


def _as_ongoing(state: IdState) -> IdState:
    newest = newest_transaction(state)
    if newest is None:
        return state
    return changed(state, transactions=(*state.transactions[:-1], changed(newest, state=TransactionState.ONGOING)))


# --- what became of it ------------------------------------------------------------------------------------------------


def outcomes_are_not_told(stack: ExitStack) -> None:
    put(stack, decide, "_get_outcome", lambda _, command: Accepted(reply=OutcomeForgotten(number=command.number)))


# --- epochs and slots -----------------------------------------------------------------------------------------------


def epochs_wrap(stack: ExitStack) -> None:
    without_invariants(stack)

    def raised(slot: Any, _context: Context, _ids: Any) -> Any:
        return changed(slot, epoch=slot.epoch + 2 if slot.epoch + 2 <= grants.EPOCH_MAX else 0)

    put(stack, grants, "_raised", raised)


def epochs_are_raised_by_one(stack: ExitStack) -> None:
    without_invariants(stack)

    def raised(slot: Any, _context: Context, _ids: Any) -> Any:
        return changed(slot, epoch=max(slot.epoch + 1, 0))

    put(stack, grants, "_raised", raised)


def slots_with_debts_are_used(stack: ExitStack) -> None:
    without_invariants(stack)
    put(stack, grants, "slot_is_free", lambda _state, _slot: True)
    put(stack, decide, "debt_in_slot", lambda _state: None)
    put(stack, marker_plan.Turns, "take", lambda _self, _owed: True)
    put(stack, marker_plan.Turns, "pass_on", lambda _self, _owed: None)


# --- topics created again ---------------------------------------------------------------------------------------------


def changes_of_topics_are_not_counted(stack: ExitStack) -> None:
    real = topics.news

    def news(*args: Any) -> Any:
        return tuple(changed(found, change=0) for found in real(*args))

    put(stack, decide, "news", news)


def commits_go_by_name(stack: ExitStack) -> None:
    put(stack, decide, "_refuse_changed", lambda *_: None)


# --- time -----------------------------------------------------------------------------------------------------------


def only_begun_transactions_expire(stack: ExitStack) -> None:
    real = clocks.Clocks.expired

    def expired(self: clocks.Clocks, now_ms: int) -> Iterator[Any]:
        return (timeout for timeout in real(self, now_ms) if self._clocks[timeout.transactional_id].begun)

    put(stack, clocks.Clocks, "expired", expired)


def clocks_do_not_start_at_a_take_over(stack: ExitStack) -> None:
    real = clocks.Clocks.tick

    def tick(self: clocks.Clocks, state: IdState, command: Any, now_ms: int) -> None:
        if command is not None:
            real(self, state, command, now_ms)

    put(stack, clocks.Clocks, "tick", tick)
