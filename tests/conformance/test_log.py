"""What stands in the log, as far as the core decides it: one test per rule."""

import pytest
from msgspec.structs import replace

from coordinator.core.commands import Accepted, Expire, NeedsProducerId
from coordinator.core.decide import decide
from coordinator.core.invariants import InvariantBrokenError, check_step
from coordinator.core.records import IdState, grant_of
from tests.conformance.calls import (
    ABORT,
    COMMIT,
    P0,
    P1,
    add,
    end,
    following,
    granted,
    init,
    owned,
    prepare,
    state_of,
    timeout,
    wrote,
)
from tests.model.desk import HOUR_MS, Desk, compacted, fold


@pytest.fixture
def desk() -> Desk:
    """One that has seen a good deal."""
    desk = Desk()
    grant = owned(desk, P0, slots_max=4)
    grant = following(desk, end(grant, COMMIT, wrote(P0, metadata=b"row-1"), chain=(P1,)))
    desk.call(timeout(grant))
    grant = granted(desk, init(by="two", without_waiting=True))
    granted(desk, add(grant, P0, group="g"))
    desk.call(prepare(grant, wrote(P0)))
    return desk


@pytest.mark.parametrize("compact", [False, True])
def test_state_is_the_fold_of_the_log(desk: Desk, compact: bool) -> None:
    """State = fold(log); compaction, which keeps the last record of each key, changes nothing."""
    live = dict(desk.state.active)
    desk.crash(compact=compact)
    assert desk.state.active == live


def test_every_step_is_one_record_with_the_whole_state(desk: Desk) -> None:
    """A record is the id's full state after the step: the last one alone is enough."""
    assert [type(record) for record in desk.log] == [IdState] * 7
    assert fold(desk.log[-1:]).active == desk.state.active


def test_an_expired_id_leaves_nothing_but_the_floor(desk: Desk) -> None:
    """Compacted, an expired id is its tombstone, and the partition's floor remains."""
    desk = Desk()
    owned(desk)
    desk.advance(200 * HOUR_MS)
    desk.call(Expire(transactional_id="a", idle_since_before_ms=desk.now_ms))
    state = fold(compacted(desk.log))
    assert (len(state), state.number_floor) == (0, 1)


def test_decide_changes_nothing(desk: Desk) -> None:
    """Only apply changes state: a decision whose append fails has never been."""
    before, grant = state_of(desk), grant_of(state_of(desk))
    copy = replace(before)
    for command in (end(grant, ABORT), end(grant, COMMIT), init(by="three", keep_prepared=True)):
        assert desk.ask(command) == desk.ask(command)
    assert state_of(desk) is before
    assert before == copy


def test_a_step_that_needs_producer_ids_says_so_and_takes_none() -> None:
    """Without a fresh producer id at hand nothing is decided; with more than needed, only those used are taken."""
    desk = Desk()
    assert decide(None, init(), replace(desk.context("a"), producer_ids=())) == NeedsProducerId()
    decision = decide(None, init(), replace(desk.context("a"), producer_ids=(7, 8, 9)))
    assert isinstance(decision, Accepted)
    assert decision.producer_ids_used == 1


def test_a_step_that_contradicts_the_log_is_loud() -> None:
    """A record that would break a promise already made stops the partition instead of being written."""
    desk = Desk()
    grant = owned(desk, P0)
    committed, aborted = desk.ask(end(grant, COMMIT, wrote(P0))), desk.ask(end(grant, ABORT))
    assert isinstance(committed, Accepted)
    assert isinstance(aborted, Accepted)
    desk.append(committed)
    with pytest.raises(InvariantBrokenError, match="outcome of 1 changed"):
        desk.append(aborted)
    after = state_of(desk)
    with pytest.raises(InvariantBrokenError, match="number fell"):
        check_step(after, replace(after, number=1, outcomes=(), transactions=()))
