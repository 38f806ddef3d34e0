"""A checker that has never caught anything proves nothing: each planted bug must be found by the seeded walks."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.core import decide, ending, grants, initialise, invariants, owed, topics
from coordinator.core.commands import Accepted, Ended
from coordinator.core.ending import decide_newest
from coordinator.core.topics import is_older_than
from tests.model import desk
from tests.model.machine import walks

Patch = Callable[[pytest.MonkeyPatch], None]


def late_calls_count_for_the_newest(patch: pytest.MonkeyPatch) -> None:
    """R1: a delayed commit or abort ends the next transaction."""
    patch.setattr(decide, "identify", lambda _state, _grant: None)


def epochs_are_shared(patch: pytest.MonkeyPatch) -> None:
    """R7: two inits get the same epoch."""
    patch.setattr(grants, "_raised", lambda slot, _context, _ids: replace(slot, epoch=max(slot.epoch, 0)))
    patch.setattr(invariants, "_step_breaches", lambda _before, _after: iter(()))


def stale_grants_are_claims(patch: pytest.MonkeyPatch) -> None:
    """R10: a zombie's init with a stale grant aborts the newer owner's transaction."""
    patch.setattr(initialise, "_check_claim", lambda _state, _grant, _instance, _wait: None)


def slots_with_debts_are_used(patch: pytest.MonkeyPatch) -> None:
    """R21: the next transaction runs while a marker of its producer id is owed."""
    patch.setattr(decide, "debt_in_slot", lambda _state: None)
    _without_invariants(patch)


def numbers_start_anew(patch: pytest.MonkeyPatch) -> None:
    """R22: the numbers of an expired id are handed out again."""
    real = initialise.init_new
    patch.setattr(decide, "init_new", lambda cmd, context, ids: real(cmd, replace(context, number_floor=0), ids))


def markers_carry_the_data_epoch(patch: pytest.MonkeyPatch) -> None:
    """R2: a late write comes after the marker and leaves a hanging transaction."""
    _with_marker_epoch(patch, -1)


def markers_carry_the_next_epoch(patch: pytest.MonkeyPatch) -> None:
    """R15: a repeated marker ends the transaction that came next."""
    _with_marker_epoch(patch, +1)


def aborts_mark_what_was_reported(patch: pytest.MonkeyPatch) -> None:
    """An abort leaves partitions unmarked where a write is still under way."""
    _with_marked(patch, lambda transaction: frozenset())


def a_partition_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A commit's marker is missing on one partition: its data hangs."""
    real = owed.marked_partitions
    _with_marked(patch, lambda transaction: frozenset(sorted(real(transaction))[1:]))


def a_prepared_transaction_has_two_heirs(patch: pytest.MonkeyPatch) -> None:
    """The old owner and the one that took a PREPARED transaction over both get the grant that follows it."""
    real = initialise._init_prepared

    def planted(state: Any, newest: Any, command: Any, context: Any) -> Any:
        decision = real(state, newest, command, context)
        if isinstance(decision, Accepted) and decision.records:
            record: Any = decision.records[0]
            owner = replace(record.owner, number_first=record.number)
            return replace(decision, records=(replace(record, owner=owner),))
        return decision

    patch.setattr(initialise, "_init_prepared", planted)


def any_finder_takes_the_id_back(patch: pytest.MonkeyPatch) -> None:
    """R10: the older of two who found the same PREPARED transaction aborts what the newer one has begun."""
    real = grants.was_found_prepared
    patch.setattr(initialise, "_is_finder", lambda state, grant, _instance, outcome: real(state, grant.number, outcome))


def a_finder_is_fenced_by_itself(patch: pytest.MonkeyPatch) -> None:
    """Who found a PREPARED transaction is refused, though nobody came since."""
    patch.setattr(initialise, "_is_finder", lambda *_: False)


def a_timeout_fences_its_owner(patch: pytest.MonkeyPatch) -> None:
    """R8: the chained transaction times out, and the owner that has not heard of it is refused."""
    real = decide._abort_newest
    planted = lambda state, *rest: replace(real(state, *rest), origin_number=state.number)  # noqa: E731
    patch.setattr(decide, "_abort_newest", planted)


def old_debts_have_no_outcome(patch: pytest.MonkeyPatch) -> None:
    """An outcome is forgotten while its markers are still owed."""

    def planted(state: Any, number: int) -> Any:
        return next((outcome for outcome in state.outcomes if outcome.grant.number == number), None)

    for module in (decide, grants, initialise):
        patch.setattr(module, "outcome_of", planted)


def an_aborts_metadata_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The resume token of a transaction that was prepared and then aborted comes back."""

    def planted(state: Any, result: Any, cause: Any, contents: Any, context: Any) -> Any:
        newest = state.transactions[-1] if state.transactions else None
        return decide_newest(state, result, cause, newest.contents if newest else contents, context)

    patch.setattr(decide, "decide_newest", planted)


def debts_are_not_bounded(patch: pytest.MonkeyPatch) -> None:
    """A partition that is down collects ever more transactions."""
    patch.setattr(decide, "registration_obstacle", lambda *_: None)


def changes_of_topics_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """R12: a producer id goes on in a topic created again, and commits what came late there from an older epoch."""
    real = topics.news
    patch.setattr(decide, "news", lambda *args: tuple(replace(found, change=0) for found in real(*args)))


def commits_go_by_name(patch: pytest.MonkeyPatch) -> None:
    """R12: a transaction that wrote to a topic and to its namesake is committed."""
    patch.setattr(decide, "_refuse_changed", lambda *_: None)


def dropped_markers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A producer id whose marker was given up is used again, and commits what it had left open."""
    patch.setattr(grants, "_without_dropped", lambda state, _context: state.slots)


def dropped_slots_are_granted(patch: pytest.MonkeyPatch) -> None:
    """As above, where its next grant was handed out already."""
    patch.setattr(decide, "is_older_than", lambda slot, *rest: slot.topic_changes >= 0 and is_older_than(slot, *rest))


def outcomes_change(patch: pytest.MonkeyPatch) -> None:
    """A repeat of the other result overturns the decision."""
    patch.setattr(decide, "_ended_already", lambda state, command, outcome, wait: _overturned(state, command, outcome))


PLANTED: tuple[Patch, ...] = (
    late_calls_count_for_the_newest,
    epochs_are_shared,
    stale_grants_are_claims,
    slots_with_debts_are_used,
    numbers_start_anew,
    markers_carry_the_data_epoch,
    markers_carry_the_next_epoch,
    aborts_mark_what_was_reported,
    a_partition_is_forgotten,
    a_prepared_transaction_has_two_heirs,
    any_finder_takes_the_id_back,
    a_finder_is_fenced_by_itself,
    a_timeout_fences_its_owner,
    old_debts_have_no_outcome,
    an_aborts_metadata_is_kept,
    debts_are_not_bounded,
    changes_of_topics_are_not_counted,
    commits_go_by_name,
    dropped_markers_are_forgotten,
    dropped_slots_are_granted,
    outcomes_change,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, invariants.InvariantBrokenError)):
        walks(range(2_000))


def _without_invariants(patch: pytest.MonkeyPatch) -> None:
    """So that the consequences at the broker are what is found."""
    patch.setattr(invariants, "_breaches", lambda _state: iter(()))


def _with_marker_epoch(patch: pytest.MonkeyPatch, by: int) -> None:
    real = owed.owed
    planted = lambda state: tuple(replace(d, marker_epoch=d.marker_epoch + by) for d in real(state))  # noqa: E731
    patch.setattr(desk, "owed", planted)


def _with_marked(patch: pytest.MonkeyPatch, marked: Callable[[Any], frozenset[Any]]) -> None:
    for module in (owed, ending):
        patch.setattr(module, "marked_partitions", marked)


def _overturned(state: Any, command: Any, outcome: Any) -> Any:
    changed = replace(outcome, result=command.result)
    outcomes = tuple(changed if known == outcome else known for known in state.outcomes)
    return Accepted(reply=Ended(outcome=changed, next_grant=None), records=(replace(state, outcomes=outcomes),))
