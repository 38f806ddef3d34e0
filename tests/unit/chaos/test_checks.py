"""A good history passes; each anomaly, made by hand, is caught by its name and told with its operations."""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proof.chaos import summary
from proof.chaos.book import Book
from proof.chaos.checks import CHECKS, Finding, check
from proof.chaos.client import unsettled_of
from proof.chaos.history import (
    ABORTED,
    COMMITTED,
    UNKNOWN,
    Commit,
    Ending,
    Event,
    Fault,
    FinalCopies,
    FinalLog,
    FinalMarkers,
    FinalRecords,
    FinalRows,
    Finished,
    Healed,
    HeldBack,
    HistoryError,
    Invoke,
    Line,
    Look,
    Placed,
    Poll,
    Recorder,
    Row,
    Stuck,
    Sum,
    Told,
    Write,
    decode,
    encode,
    merge,
    read,
)

TOPICS = ("debits", "credits", "journal")


def invoke(op: str, at: int, number: int) -> Invoke:
    writes = tuple(Write(topic, f"{op}#{index}", 7) for index, topic in enumerate(TOPICS))
    return Invoke(at_ns=at, op=op, client="bank.1", transactional_id="bank", number=number, writes=writes)


def placed(op: str, offset: int) -> tuple[Placed, ...]:
    return tuple(Placed(f"{topic}-0", offset, f"{op}#{index}", 7) for index, topic in enumerate(TOPICS))


def rows(op: str) -> tuple[Row, ...]:
    return tuple(Row(topic, f"{op}#{index}", 7) for index, topic in enumerate(TOPICS))


def ended(op: str, offset: int, *, is_commit: bool = True, epoch: int = 0) -> tuple[Ending, ...]:
    return tuple(
        Ending(f"{topic}-0", offset, 7, is_commit, [epoch], [f"{op}#{index}"], epoch + 1)
        for index, topic in enumerate(TOPICS)
    )


def look(at: int, count: int, *, lists: int = 0) -> Look:
    sums = {topic: Sum(count, 7 * count, 11 * count) for topic in TOPICS}
    return Look(at_ns=at, reader="looker", sums=sums | {"lists": Sum(lists, lists, 0)})


def good() -> list[Event]:
    """A is committed; b aborted; the answer to c was lost, and it was committed; d died before it asked to commit."""
    return [
        invoke("a", 10, 1),
        Commit(at_ns=11, op="a", number=1),
        Told(at_ns=14, op="a", outcome=COMMITTED, by="bank.1", places=placed("a", 0)),
        Poll(at_ns=15, reader="poller", records=placed("a", 0)),
        look(16, 1),
        invoke("b", 20, 2),
        Told(at_ns=24, op="b", outcome=ABORTED, by="bank.1"),
        Fault(at_ns=25, fault="kill-broker", target="broker 2", until_ns=28),
        Fault(at_ns=26, fault="late-request", target="Produce to broker 1, none came", until_ns=28, had_effect=False),
        Healed(at_ns=29),
        invoke("c", 30, 3),
        Commit(at_ns=31, op="c", number=3),
        Told(at_ns=34, op="c", outcome=UNKNOWN, by="bank.1", error="timed out"),
        Told(at_ns=35, op="c", outcome=COMMITTED, by="bank.1", places=placed("c", 4)),
        Poll(at_ns=36, reader="poller", records=placed("c", 4)),
        look(37, 2),
        invoke("d", 40, 4),
        Told(at_ns=60, op="d", outcome=ABORTED, by="the end"),
        FinalMarkers(
            at_ns=69, endings=(*ended("a", 1), *ended("b", 3, is_commit=False, epoch=2), *ended("c", 5, epoch=4))
        ),
        FinalLog(at_ns=69, left=5, written=9),
        FinalRecords(at_ns=70, records=(*placed("a", 0), *placed("c", 4))),
        FinalRows(at_ns=71, rows=(*rows("a"), *rows("c"))),
        Finished(at_ns=72, money=100),
    ]


def judge(events: Sequence[Event]) -> list[Finding]:
    return check(Book(Line(number, event) for number, event in enumerate(events, start=1)))


def only(kind: type[Event], *, nth: int = 0, **changes: Any) -> list[Event]:
    """The good history, with one event of a kind changed, or (no changes) left out."""
    events = good()
    at = [place for place, event in enumerate(events) if type(event) is kind][nth]
    changed: list[Event] = [dataclasses.replace(events[at], **changes)] if changes else []
    return [*events[:at], *changed, *events[at + 1 :]]


def without(kind: type[Event]) -> list[Event]:
    return [event for event in good() if not isinstance(event, kind)]


def polled(*records: Placed) -> list[Event]:
    """All that the poller got, at once."""
    events = only(Poll, nth=0)
    return [dataclasses.replace(event, records=records) if isinstance(event, Poll) else event for event in events]


def final(*records: Placed) -> list[Event]:
    return only(FinalRecords, records=records)


def final_rows(*found: Row) -> list[Event]:
    return only(FinalRows, rows=found)


LISTED = tuple(Placed("lists-0", offset, f"l#{offset}", 1) for offset in range(3))


def listed(*final_copies: FinalCopies) -> list[Event]:
    """The good history and a list of three, with what was read of its copies."""
    writes = tuple(Write("lists", record.item, 1) for record in LISTED)
    items = [record.item for record in LISTED]
    endings = [Ending("lists-0", 3, 7, True, [0], items, 1)]
    copies = [record.item for event in final_copies for record in event.records]
    if copies:
        endings.append(Ending("copies-0", 9, 8, True, [0], copies, 1))
    found = [event for event in good() if not isinstance(event, FinalRecords | FinalRows)]
    return [
        *found[:-1],
        Invoke(at_ns=61, op="l", client="lists.1", transactional_id="lists", number=1, writes=writes),
        Commit(at_ns=62, op="l", number=1),
        Told(at_ns=63, op="l", outcome=COMMITTED, by="lists.1", places=LISTED),
        Poll(at_ns=64, reader="poller", records=LISTED),
        look(65, 2, lists=3),
        FinalRecords(at_ns=70, records=(*placed("a", 0), *placed("c", 4), *LISTED)),
        *final_copies,
        FinalMarkers(at_ns=70, endings=tuple(endings)),
        FinalRows(at_ns=71, rows=(*ROWS, *(Row("lists", record.item, 1) for record in LISTED))),
        found[-1],
    ]


def copied(*copies: tuple[int, str]) -> list[Event]:
    """With these: offset and item."""
    records = tuple(Placed("copies-0", offset, item, 1) for offset, item in copies)
    return listed(FinalCopies(at_ns=70, records=records))


A, B, C = placed("a", 0), placed("b", 2), placed("c", 4)
ROWS = (*rows("a"), *rows("c"))
BAD: dict[str, list[Event]] = {
    "duplicate": final(*A, *C, Placed("debits-0", 9, "a#0", 7)),
    "aborted read": only(Poll, records=(B[0], *C), nth=1),
    "read before commit": only(Poll, at_ns=10, nth=0),
    "lost write": final(A[0], A[1], C[0], C[1], C[2]),
    "unseen after the final read": final(*A, C[0], C[1]),
    "torn transaction": final(*A, C[0], C[1]),
    "inconsistent offsets": final(*A, *C, Placed("debits-0", 0, "b#0", 7)),
    "step back": only(Poll, records=(C[0], A[0]), nth=1),
    "skip": final(*A, *placed("b", 2), *C),
    "order": final(Placed("debits-0", 0, "c#0", 7), Placed("debits-0", 4, "a#0", 7)),
    "money in Kafka": final(*A, C[0]),
    "copy": copied((0, "l#0"), (2, "l#2")),
    "duplicate row": final_rows(*ROWS, ROWS[1]),
    "aborted row": final_rows(*ROWS, *rows("b")),
    "torn transaction in PostgreSQL": final_rows(*ROWS[:-1]),
    "step back in PostgreSQL": only(Look, sums=look(0, 0).sums, nth=1),
    "money in PostgreSQL": final_rows(*ROWS[:-1], ROWS[-1]._replace(amount=8)),
    "row without record": final(*A),
    "record without row": final_rows(*rows("a")),
    "row unlike its record": final_rows(*ROWS[:-1], ROWS[-1]._replace(amount=8)),
    "decision divergence": [*good(), Told(at_ns=80, op="a", outcome=ABORTED, by="somebody")],
    "marker unlike its decision": only(FinalMarkers, endings=(*ended("a", 1), *ended("b", 3, epoch=2))),
    "cross-transaction capture": only(FinalMarkers, endings=(ended("a", 1)[0]._replace(epochs=[0, 2]),)),
    "number used twice": only(Commit, number=1, nth=1),
    "unknown outcome": only(Told, nth=3),
    "hanging transaction": [*good(), HeldBack(at_ns=80, partition="lists-1", offset_stable=34, offset_next=373)],
    "no progress": [*only(Healed, at_ns=41), look(42, 2)],
    "stuck": [*good(), Stuck(at_ns=80, what="relay-1 ended by itself")],
    "blind watcher": only(Poll, nth=1),
}


def test_a_good_history_passes() -> None:
    assert judge(good()) == []


def test_each_check_has_a_history_that_it_must_catch() -> None:
    assert set(BAD) == set(CHECKS)


@pytest.mark.parametrize("name", BAD)
def test_it_is_caught_and_proved(name: str) -> None:
    found = {finding.check: finding for finding in judge(BAD[name])}
    assert name in found
    assert found[name].proof


def test_a_part_of_a_transaction_at_one_look() -> None:
    """The same count and the same money, but of other transfers: only the digest tells."""
    torn = look(0, 2).sums | {"journal": Sum(2, 14, 23)}
    events = only(Look, sums=torn, nth=1)
    assert {finding.check for finding in judge(events)} == {"torn transaction in PostgreSQL"}


@pytest.mark.parametrize(
    ("copies", "text"),
    [
        ([(0, "l#0"), (1, "l#1"), (4, "l#2")], None),
        ([(0, "l#0"), (2, "l#2")], "l#1 was copied 0 times"),
        ([(0, "l#0"), (1, "l#1"), (2, "l#1"), (3, "l#2")], "l#1 was copied 2 times"),
        ([(0, "l#0"), (1, "l#2"), (2, "l#1")], "a copy stands where l#1 should"),
        ([(0, "l#0"), (1, "l#1"), (2, "l#2"), (3, "a#0")], "a#0 is a copy of nothing"),
    ],
)
def test_every_record_has_one_copy_in_its_place(copies: list[tuple[int, str]], text: str | None) -> None:
    found = judge(copied(*copies))
    assert [finding.check for finding in found] == ([] if text is None else ["copy"])
    assert text is None or found[0].text == text


@pytest.mark.parametrize(
    ("events", "texts"),
    [
        (listed(), ["nobody read the copies of the 3 records of the lists"]),
        (copied(), [f"l#{number} was copied 0 times" for number in range(3)]),
    ],
)
def test_no_copies_at_all(events: list[Event], texts: list[str]) -> None:
    """Nobody has looked, or there is nothing."""
    assert [(finding.check, finding.text) for finding in judge(events)] == [("copy", text) for text in texts]


def test_nobody_has_to_read_copies_of_nothing() -> None:
    assert judge([*good()[:-1], FinalCopies(at_ns=71, records=()), good()[-1]]) == []


@pytest.mark.parametrize(
    ("events", "text"),
    [
        (without(Poll), "nobody read anything while faults came"),
        (only(Poll, nth=1), "poller read no further than offset 0 of debits-0, which has c#0 at 4"),
        (polled(*A[1:], *C[1:]), "poller read nothing of debits-0, which has c#0 at 4"),
        (without(Look), "nobody looked at PostgreSQL after healing, 0 times before"),
        (only(Look, nth=1), "nobody looked at PostgreSQL after healing, 1 times before"),
        (only(Look, sums=look(37, 1).sums, nth=1), "looker saw 1 rows of debits at last, which has 2"),
        (only(Look, sums={}, nth=1), "looker saw 0 rows of debits at last, which has 2"),
        (only(FinalMarkers), "no commit marker was found behind a#0 and 1 more in debits-0"),
        (
            only(FinalMarkers, endings=(*ended("a", 1), *ended("c", 5, epoch=4)[1:])),
            "no commit marker was found behind c#0 in debits-0",
        ),
    ],
)
def test_whoever_looks_has_to_look_to_the_end(events: list[Event], text: str) -> None:
    found = judge(events)
    assert {finding.check for finding in found} == {"blind watcher"}
    assert text in {finding.text for finding in found}


def test_a_reader_that_begins_in_the_midst_has_passed_over_the_first_record() -> None:
    found = judge(polled(*C))
    assert [(each.check, each.text) for each in found] == [("skip", f"poller began behind a#{nth}") for nth in range(3)]
    assert found[0].proof == (
        "line 14, 0.000 s: poller reads c#0 at debits-0:4",
        "line 20, 0.000 s: final read reads a#0 at debits-0:0",
    )


@pytest.mark.parametrize(
    ("ending", "check"),
    [
        (Ending("debits-0", 1, 7, False, [0], ["a#0"]), "marker unlike its decision"),
        (Ending("debits-0", 1, 7, True, [0], ["a#0", "c#0"]), "cross-transaction capture"),
        # The copier tries again what it had to abort, and takes many operations at once; two transactions it does not.
        (Ending("copies-0", 1, 7, False, [0], ["a#0"]), None),
        (Ending("copies-0", 1, 7, True, [0], ["a#0", "c#0"]), None),
        (Ending("copies-0", 1, 7, True, [0, 2], ["a#0", "c#0"]), "cross-transaction capture"),
        (Ending("copies-0", 1, 7, True, [0], ["b#0"]), "marker unlike its decision"),
        # A marker that was repeated ends nothing, unless it ends what comes behind it: then its epoch is too low.
        (Ending("debits-0", 1, 7, False, [], [], 1), None),
        (Ending("debits-0", 1, 7, True, [2], ["c#0"], 1), "cross-transaction capture"),
        (Ending("copies-0", 1, 7, True, [2], ["c#0"], 1), "cross-transaction capture"),
        (Ending("debits-0", 1, 7, True, [2], ["c#0"], 2), "cross-transaction capture"),
        (Ending("debits-0", 1, 7, True, [2], ["c#0"], 3), None),
        # Of a history from when it was not noted.
        (Ending("debits-0", 1, 7, True, [2], ["c#0"], -1), None),
    ],
)
def test_a_marker_says_what_was_decided_of_one_transaction(ending: Ending, check: str | None) -> None:
    # Here there are no others, which is another anomaly.
    found = {finding.check for finding in judge(only(FinalMarkers, endings=(ending,)))} - {"blind watcher"}
    assert found == (set() if check is None else {check})


def test_a_transfer_of_the_circle_is_whole_at_each_look() -> None:
    whole = {topic: Sum(2, 14, 22) for topic in ("withdrawals", "deposits", "receipts")}
    assert judge(only(Look, sums=look(0, 2).sums | whole, nth=1)) == []
    torn = whole | {"receipts": Sum(1, 7, 11)}
    events = only(Look, sums=look(0, 2).sums | torn, nth=1)
    assert {each.check for each in judge(events)} == {"torn transaction in PostgreSQL", "money in PostgreSQL"}


def test_money_missing_at_one_look() -> None:
    wrong = look(0, 2).sums | {"credits": Sum(2, 13, 22)}
    events = only(Look, sums=wrong, nth=1)
    assert {finding.check for finding in judge(events)} == {"money in PostgreSQL"}


def test_told_aborted_but_all_of_it_stands() -> None:
    events = final(*A, *B, *C)
    assert "decision divergence" in {finding.check for finding in judge(events)}


def test_told_committed_but_nothing_of_it_stands() -> None:
    assert "decision divergence" in {finding.check for finding in judge(final(*A))}


def test_the_proof_names_the_operation_from_begin_to_answer() -> None:
    (finding,) = [each for each in judge(BAD["aborted read"]) if each.check == "aborted read"]
    assert finding.text == "b is aborted, and was read"
    assert finding.proof == (
        "line 6, 0.000 s: bank.1 begins b (number 2): debits:b#0, credits:b#1, journal:b#2",
        "line 7, 0.000 s: bank.1 is told that b is aborted",
        "line 15, 0.000 s: poller reads b#0 at debits-0:2",
    )


def test_an_unfinished_history_is_not_asked_for_what_should_be_there_in_the_end() -> None:
    events = [event for event in good() if not isinstance(event, FinalRecords | FinalRows | Finished)]
    assert judge(events) == []


def test_what_never_asked_to_commit_is_not_unknown() -> None:
    events = only(Told, nth=4)
    assert judge(events) == []


def told_after(healed_ns: int, took_s: float) -> list[Event]:
    """The good history, healed at that time, and one more operation of the same client's successor."""
    at_ns = healed_ns + int(took_s * 1e9)
    *events, _, _, _ = only(Healed, at_ns=healed_ns)
    later = dataclasses.replace(invoke("e", healed_ns + 1, 5), client="bank.2")
    return [
        *events,
        later,
        Commit(at_ns=at_ns - 1, op="e", number=5),
        Told(at_ns=at_ns, op="e", outcome=COMMITTED, by="bank.2", places=placed("e", 6)),
        Poll(at_ns=at_ns, reader="poller", records=placed("e", 6)),
        look(at_ns, 3),
        FinalMarkers(at_ns=at_ns, endings=ended("e", 7, epoch=6)),
        FinalRecords(at_ns=at_ns + 1, records=(*A, *C, *placed("e", 6))),
        FinalRows(at_ns=at_ns + 2, rows=(*ROWS, *rows("e"))),
        Finished(at_ns=at_ns + 3, money=100),
    ]


@pytest.mark.parametrize(("took_s", "found"), [(119, []), (121, ["no progress"])])
def test_after_healing_a_client_or_its_successor_gets_something_through_in_time(
    took_s: float, found: list[str]
) -> None:
    assert [finding.check for finding in judge(told_after(41, took_s))] == found


def test_what_began_before_healing_is_no_progress() -> None:
    (finding,) = judge(BAD["no progress"])
    assert finding.text == "bank committed nothing that it began in the 120 s after healing"
    assert "bank.1 begins d" in finding.proof[0]


def test_somebody_who_passes_by_need_not_get_anything_through() -> None:
    passer = dataclasses.replace(invoke("p", 35, 1), client="passer-1-1", transactional_id="passer-1-1")
    assert judge([*good(), passer]) == []


def test_a_history_that_is_cut_soon_after_healing_tells_nothing_of_progress() -> None:
    events = [event for event in only(Healed, at_ns=41) if event.at_ns <= 41]
    assert judge(events) == []


def test_all_anomalies_are_counted_and_the_first_ones_shown() -> None:
    events = [*good(), *(Stuck(at_ns=80, what=f"part {number}") for number in range(5))]
    book = Book(Line(number, event) for number, event in enumerate(events, start=1))
    findings = check(book)
    shown = summary.as_text(book, findings)
    assert "\nanomalies         5\nstuck: part 0\n" in shown
    assert "stuck: part 2\n" in shown
    assert "part 3" not in shown
    assert shown.endswith("\nstuck: 2 more")
    told = summary.as_json(book, findings)
    assert told["anomaly_counts"] == {"stuck": 5}
    assert len(told["anomalies"]) == 3


def test_silence_is_not_broken_by_who_commits_to_the_database() -> None:
    def told(client: str, *at_s: int) -> list[Event]:
        events: list[Event] = []
        for number, second in enumerate(at_s, start=1):
            op, at = f"{client}/{number}", second * 1_000_000_000
            events.append(dataclasses.replace(invoke(op, at - 1, number), client=client, transactional_id=client))
            events.append(Told(at_ns=at, op=op, outcome=COMMITTED, by=client))
        return events

    events = [*told("bank-1.1", 1, 3), *told("lists-1.1", 2, 10), *told("outbox-1.1", 4, 5, 6, 7, 8, 9)]
    ordered = sorted(events, key=lambda event: event.at_ns)
    book = Book(Line(number, event) for number, event in enumerate(ordered, start=1))
    assert summary.longest_gap_s(book) == 7


def test_a_successor_asks_only_for_what_was_left_without_an_answer(tmp_path: Path) -> None:
    with Recorder(tmp_path / "former") as recorder:
        for event in only(Told, nth=3):
            recorder.add(event)
    assert unsettled_of([tmp_path / "former"]) == [("c", 3)]


def test_events_come_back_from_their_lines() -> None:
    for event in [*copied((0, "l#0")), Stuck(at_ns=1, what="x")]:
        assert decode(encode(event)) == event


def test_the_line_in_the_hand_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with Recorder(path) as recorder:
        recorder.add(Healed(at_ns=5))
    with path.open("a") as file:
        file.write('{"event":"inv')
    assert [line.event for line in read(path)] == [Healed(at_ns=5)]
    with path.open("a") as file:
        file.write("oke\n")
    with pytest.raises(HistoryError, match="line 2"):
        list(read(path))


def test_files_are_merged_by_time(tmp_path: Path) -> None:
    for name, times in (("one", (1, 4)), ("two", (2, 3))):
        with Recorder(tmp_path / name) as recorder:
            for at in times:
                recorder.add(Healed(at_ns=at))
    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert [line.event.at_ns for line in read(tmp_path / "all")] == [1, 2, 3, 4]


def run_check(path: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "import oncebox.cli; oncebox.cli.main()", "check", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command(tmp_path: Path) -> None:
    for name, events in (("good", good()), ("bad", BAD["lost write"])):
        with Recorder(tmp_path / name) as recorder:
            for event in events:
                recorder.add(event)
    done = run_check(tmp_path / "good")
    assert done.returncode == 0, done.stderr
    assert "4: 2 committed, 2 aborted, 0 unknown (2 known only after asking)" in done.stdout
    assert "\nfaults            1: kill-broker 1\nwithout effect    1: late-request 1\n" in done.stdout
    assert "\nlog               5 of 9 records left by its compaction\n" in done.stdout
    assert done.stdout.endswith("anomalies         0\n")
    done = run_check(tmp_path / "bad")
    assert done.returncode == 1
    assert (
        "\nlost write: a#2 was committed at journal-0:0 and is gone\n    line 1, 0.000 s: bank.1 begins a"
        in done.stdout
    )
    (tmp_path / "empty").touch()
    lines = (tmp_path / "good").read_text().splitlines(keepends=True)
    (tmp_path / "cut").write_text("".join(lines[:-1]) + lines[-1][:-1])
    for name in ("empty", "cut"):
        done = run_check(tmp_path / name)
        assert done.returncode == 4, done.stderr
        assert done.stdout.endswith("was not checked\nanomalies         0 in what there is of it\n")
    (tmp_path / "no").write_text("hello\n")
    done = run_check(tmp_path / "no")
    assert done.returncode == 1
    assert done.stderr.startswith("oncebox: ")
    assert "line 1: no event of a history" in done.stderr
