"""Each check on small histories: silent on a sound one, and loud where the one thing it looks for has happened."""

from dataclasses import replace

import pytest

from proof.checker.checks import CHECKS, check
from proof.checker.history import (
    Acknowledged,
    Answered,
    Broken,
    Called,
    DatabaseDecided,
    Decided,
    Deleted,
    Event,
    Expired,
    Fed,
    Finished,
    Grant,
    Kind,
    Logged,
    Lost,
    Marked,
    Open,
    Read,
    Replayed,
    Result,
    Run,
    Stored,
    Stuck,
)

ID = "id"
FIRST, SECOND, THIRD = Grant(1, 100, 0), Grant(2, 100, 2), Grant(3, 100, 4)
FOURTH, FIFTH = Grant(4, 100, 6), Grant(5, 100, 8)
COMMITTED, ABORTED = Decided(FIRST, Result.COMMITTED), Decided(SECOND, Result.ABORTED)
THIRD_ABORTED, FOURTH_ABORTED = Decided(THIRD, Result.ABORTED), Decided(FOURTH, Result.ABORTED)


def logged(grant: Grant, *decided: Decided, offset: int, token: bytes = b"", owner: int = 1, epoch: int = 1) -> Logged:
    return Logged(
        log_partition=0,
        offset=offset,
        leader_epoch=epoch,
        transactional_id=ID,
        grant=grant,
        owner_since_number=owner,
        decided=decided,
        resume_token=token,
    )


def called(call: int, kind: Kind, number: int = 0, client: str = "a") -> Called:
    return Called(call=call, client=client, kind=kind, transactional_id=ID, number=number)


def acknowledged(grant: Grant, partition: str, offset: int, value: str) -> Acknowledged:
    return Acknowledged(client="a", transactional_id=ID, grant=grant, partition=partition, offset=offset, value=value)


def stored(grant: Grant, partition: str, offset: int, *values: str) -> Stored:
    return Stored(partition=partition, offset=offset, producer_id=grant.producer_id, epoch=grant.epoch, values=values)


def marked(grant: Grant, partition: str, offset: int, *, commit: bool) -> Marked:
    return Marked(
        partition=partition, offset=offset, producer_id=grant.producer_id, epoch=grant.epoch + 1, commit=commit
    )


def read(partition: str, offset: int, value: str) -> Read:
    return Read(reader="r", partition=partition, offset=offset, value=value)


MANIFEST = Fed(
    feed_partition=0,
    offset=1,
    leader_epoch=1,
    transactional_id=ID,
    grant=FIRST,
    part=0,
    part_count=1,
    runs=(Run("p", 0, 1), Run("q", 0, 1)),
)

# The first transaction writes to p and q and commits, the second writes to p and aborts.
SOUND: tuple[Event, ...] = (
    called(1, Kind.INIT),  # 0
    logged(FIRST, offset=1),
    Answered(call=1, grant=FIRST, resume_token=b""),
    called(2, Kind.REGISTER, 1),
    logged(FIRST, offset=2),
    Answered(call=2, grant=FIRST),  # 5
    stored(FIRST, "p", 0, "x#1"),
    acknowledged(FIRST, "p", 0, "x#1"),
    stored(FIRST, "q", 0, "y#1"),
    acknowledged(FIRST, "q", 0, "y#1"),
    called(3, Kind.END, 1),  # 10
    logged(SECOND, COMMITTED, offset=3, token=b"1"),
    MANIFEST,
    marked(FIRST, "p", 1, commit=True),
    marked(FIRST, "q", 1, commit=True),
    Answered(call=3, grant=SECOND, decided=COMMITTED, complete=True),  # 15
    read("p", 0, "x#1"),
    read("q", 0, "y#1"),
    called(4, Kind.REGISTER, 2),
    logged(SECOND, COMMITTED, offset=4, token=b"1"),
    Answered(call=4, grant=SECOND),  # 20
    stored(SECOND, "p", 2, "z#1"),
    acknowledged(SECOND, "p", 2, "z#1"),
    called(5, Kind.END, 2),
    logged(THIRD, COMMITTED, ABORTED, offset=5, token=b"1"),
    marked(SECOND, "p", 3, commit=False),  # 25
    Answered(call=5, grant=THIRD, decided=ABORTED, complete=True),
    Finished(),
)


def before_the_end(*events: Event) -> tuple[Event, ...]:
    return (*SOUND[:-1], *events, SOUND[-1])


def without(*positions: int) -> tuple[Event, ...]:
    return tuple(event for at, event in enumerate(SOUND) if at not in positions)


def with_other(position: int, **changes: object) -> tuple[Event, ...]:
    return (*SOUND[:position], replace(SOUND[position], **changes), *SOUND[position + 1 :])  # type: ignore[arg-type]


def moved(position: int, before: int) -> tuple[Event, ...]:
    rest = list(without(position))
    rest.insert(before, SOUND[position])
    return tuple(rest)


UNSOUND: dict[str, list[tuple[Event, ...]]] = {
    "aborted read": [before_the_end(read("p", 2, "z#1"))],
    "read before commit": [moved(16, 11), before_the_end(read("p", 9, "from nowhere"))],
    "lost write": [without(16), with_other(16, value="w#1")],
    "duplicate": [before_the_end(stored(FIRST, "q", 5, "x#2"), read("q", 5, "x#2"))],
    "inconsistent offsets": [before_the_end(replace(read("p", 0, "w#1"), reader="s"))],
    "step back": [before_the_end(read("p", 0, "x#1"))],
    "decision divergence": [
        before_the_end(logged(THIRD, Decided(FIRST, Result.ABORTED), ABORTED, offset=6, token=b"1")),
        with_other(15, decided=Decided(FIRST, Result.ABORTED)),
        with_other(13, commit=False),
        before_the_end(DatabaseDecided(transactional_id=ID, number=1, committed=False)),
    ],
    "marker before decision": [moved(13, 11), before_the_end(marked(Grant(9, 900, 0), "p", 4, commit=True))],
    "marker before manifest": [moved(12, 14), with_other(12, part_count=2)],
    "torn transaction": [without(14), with_other(14, commit=False)],
    "cross-transaction capture": [
        without(13),
        # Late to another topic of that name, and committed with a transaction that wrote there later.
        before_the_end(
            replace(stored(SECOND, "p@2", 0, "z#1"), stray=True),
            logged(Grant(4, 100, 6), Decided(THIRD, Result.COMMITTED), offset=6, token=b"1"),
            marked(THIRD, "p@2", 1, commit=True),
        ),
    ],
    "hanging transaction": [before_the_end(Open(partition="p", offset=2, producer_id=100, epoch=2))],
    "unknown outcome": [
        before_the_end(called(6, Kind.END, 3)),
        # Neither what comes too late nor what was asked elsewhere tells an outcome.
        *(
            before_the_end(
                called(6, Kind.END, 3),
                logged(FOURTH, COMMITTED, ABORTED, THIRD_ABORTED, offset=6, token=b"1"),
                Answered(call=6, error=error),
            )
            for error in ("REQUEST_TIMED_OUT", "NOT_COORDINATOR", "PRODUCER_FENCED")
        ),
        # The id expired, but later.
        before_the_end(
            called(6, Kind.END, 3),
            logged(FOURTH, COMMITTED, ABORTED, offset=6, token=b"1"),
            Expired(log_partition=0, offset=7, leader_epoch=1, transactional_id=ID),
        ),
        # Forgotten, though it is in the id's record, or in the feed, also of an expired id; open, though decided.
        before_the_end(called(6, Kind.OUTCOME, 2), Answered(call=6)),
        before_the_end(
            logged(FOURTH, THIRD_ABORTED, offset=6, token=b"1"), called(6, Kind.OUTCOME, 1), Answered(call=6)
        ),
        before_the_end(
            Expired(log_partition=0, offset=6, leader_epoch=1, transactional_id=ID),
            called(6, Kind.OUTCOME, 1),
            Answered(call=6, error="INVALID_PRODUCER_ID_MAPPING"),
        ),
        before_the_end(called(6, Kind.OUTCOME, 2), Answered(call=6, undecided=True)),
    ],
    "stale owner accepted": [
        before_the_end(stored(FIRST, "p", 4, "late#1")),
        before_the_end(logged(THIRD, COMMITTED, ABORTED, offset=6, token=b"1", epoch=0)),
        before_the_end(
            called(6, Kind.INIT, client="b"),
            logged(Grant(4, 100, 6), COMMITTED, ABORTED, offset=6, token=b"1", owner=4),
            Answered(call=6, grant=Grant(4, 100, 6), resume_token=b"1"),
            called(7, Kind.INIT, 3),
            logged(Grant(5, 100, 8), COMMITTED, ABORTED, offset=7, token=b"1", owner=4),
            Answered(call=7, grant=Grant(5, 100, 8), resume_token=b"1"),
        ),
    ],
    "number reused": [
        before_the_end(logged(Grant(3, 101, 0), COMMITTED, ABORTED, offset=6, token=b"1")),
        before_the_end(logged(Grant(4, 100, 4), COMMITTED, ABORTED, offset=6, token=b"1")),
        before_the_end(called(6, Kind.INIT, client="b"), Answered(call=6, grant=FIRST, resume_token=b"1")),
    ],
    "fenced without cause": [before_the_end(called(6, Kind.END, 3), Answered(call=6, error="PRODUCER_FENCED"))],
    "stale answer": [
        before_the_end(called(6, Kind.OUTCOME, 1), Answered(call=6, undecided=True)),
        before_the_end(called(6, Kind.REGISTER, 2), Answered(call=6, grant=SECOND)),
        before_the_end(called(6, Kind.OUTCOME, 3), Answered(call=6, error="INVALID_REQUEST")),
    ],
    "resume token going back": [
        with_other(24, resume_token=b"0"),
        before_the_end(called(6, Kind.INIT), Answered(call=6, grant=THIRD, resume_token=b"")),
    ],
    "acknowledged but absent after replay": [
        moved(15, 11),
        moved(2, 1),
        before_the_end(logged(Grant(4, 100, 6), COMMITTED, offset=6, token=b"1"), logged(THIRD, offset=7)),
        before_the_end(logged(Grant(4, 100, 6), COMMITTED, offset=6, token=b"1", epoch=1)),
    ],
    "manifest": [
        without(12),
        before_the_end(replace(MANIFEST, offset=2)),
        with_other(12, runs=(Run("p", 0, 2), Run("q", 0, 1))),
        before_the_end(replace(MANIFEST, grant=SECOND, runs=(Run("p", 2, 3),))),
    ],
    "stuck": [before_the_end(Stuck(what="a client"))],
    "blocked by a stranger": [before_the_end(Stuck(what="a client", by_stranger=True))],
    "broken": [before_the_end(Broken(where="a shard", error="an invariant"))],
    "memory is not the log": [before_the_end(Replayed(transactional_id=ID, differs="number 3, number 4"))],
}


def test_a_sound_history_has_no_findings() -> None:
    assert check(SOUND) == []


@pytest.mark.parametrize(
    ("name", "history"), [(name, history) for name, histories in UNSOUND.items() for history in histories]
)
def test_it_is_found(name: str, history: tuple[Event, ...]) -> None:
    assert name in {finding.check for finding in check(history)}


def test_every_check_is_tried() -> None:
    assert set(UNSOUND) == set(CHECKS)


@pytest.mark.parametrize(
    "history",
    [
        # What was never replicated does not count, and what is deleted cannot be read.
        before_the_end(stored(THIRD, "p", 4, "v#1"), Lost(partition="p", offset_next=4)),
        (*without(17)[:-1], Deleted(partition="q"), Finished()),
        # A number that an expired id had never used.
        before_the_end(
            called(6, Kind.END, 3),
            Expired(log_partition=0, offset=6, leader_epoch=1, transactional_id=ID),
            Answered(call=6, error="INVALID_PRODUCER_ID_MAPPING"),
        ),
        # An abort that is older than what the id's record keeps, and one that was decided while somebody asked.
        before_the_end(
            called(6, Kind.END, 3),
            logged(FOURTH, COMMITTED, ABORTED, THIRD_ABORTED, offset=6, token=b"1"),
            called(7, Kind.OUTCOME, 4),
            logged(FIFTH, FOURTH_ABORTED, offset=7, token=b"1"),
            Answered(call=7, undecided=True),
            called(8, Kind.OUTCOME, 3),
            Answered(call=8),
        ),
        # Who wakes up when all is over.
        (*SOUND, called(6, Kind.END, 3)),
        # Fenced by a newer owner.
        before_the_end(
            called(6, Kind.INIT, client="b"),
            logged(Grant(4, 100, 6), COMMITTED, ABORTED, Decided(THIRD, Result.ABORTED), offset=6, token=b"1", owner=4),
            called(7, Kind.REGISTER, 3),
            Answered(call=7, error="PRODUCER_FENCED", decided=Decided(THIRD, Result.ABORTED)),
        ),
        # What came late to another topic of that name is aborted: by the search for what hangs, or with the next abort;
        # and where a commit wrote nothing because the topic came later, an abort fences.
        before_the_end(
            Deleted(partition="p"),
            replace(stored(FIRST, "p@2", 0, "x#1"), stray=True),
            replace(marked(FIRST, "p@2", 1, commit=False), hanging=True),
            replace(stored(FIRST, "p@3", 0, "x#1"), stray=True),
            marked(SECOND, "p@3", 1, commit=False),
            marked(FIRST, "q@2", 0, commit=False),
        ),
        # A marker that was lost with its broker is written again; a repeat ends nothing.
        (
            *SOUND[:14],
            Lost(partition="p", offset_next=1),
            marked(FIRST, "p", 1, commit=True),
            marked(FIRST, "q", 2, commit=True),
            *SOUND[14:],
        ),
    ],
)
def test_what_may_happen_is_no_finding(history: tuple[Event, ...]) -> None:
    assert check(history) == []


def test_while_the_run_lasts_nothing_is_missed_yet() -> None:
    for end in range(len(SOUND)):
        assert check(SOUND[:end]) == []
