"""A history and its findings in a few lines, and as JSON."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

from proof.chaos.book import READER_FINAL, Book, counts
from proof.chaos.checks import SHOWN_PER_CHECK_MAX, Finding
from proof.chaos.history import COMMITTED, UNKNOWN, Fault
from proof.chaos.workload import OUTBOX


def longest_gap_s(book: Book) -> float:
    """The longest time without any commit to Kafka, while clients worked. Those of the outbox commit to PostgreSQL."""
    commits = sorted(
        line.event.at_ns
        for operation in book.operations.values()
        if not operation.invoke.client.startswith(OUTBOX)
        for line, told in operation.told
        if told.outcome == COMMITTED and told.by == operation.invoke.client
    )
    gaps = [after - before for before, after in pairwise(commits)]
    return max(gaps, default=0) / 1e9


def as_json(book: Book, findings: list[Finding]) -> dict[str, Any]:
    return {
        **counts(book),
        "seconds": (book.ended_ns - book.began_ns) / 1e9,
        "faults": _counted(fault for fault in book.faults if fault.had_effect),
        "faults_without_effect": _counted(fault for fault in book.faults if not fault.had_effect),
        "longest_unavailable_s": longest_gap_s(book),
        "records_read": {reader: len(seen) for reader, seen in book.seen.items()},
        "markers": {
            "commit": sum(each.ending.is_commit for each in book.endings),
            "abort": sum(not each.ending.is_commit for each in book.endings),
        },
        "copies": len(book.copies or ()),
        "log": {"left": book.log.left, "written": book.log.written} if book.log else {},
        "rows": sum(len(rows) for rows in book.rows.values()),
        "looks": len(book.looks),
        "asked_later": sum(
            any(told.outcome == UNKNOWN for _, told in each.told) or each.told[0][1].by != each.invoke.client
            for each in book.operations.values()
            if each.told
        ),
        "finished": book.finished is not None,
        "anomalies": [asdict(each) for of_check in _by_check(findings) for each in of_check[:SHOWN_PER_CHECK_MAX]],
        "anomaly_counts": dict(Counter(finding.check for finding in findings)),
    }


def as_text(book: Book, findings: list[Finding]) -> str:
    found = as_json(book, findings)
    read = sum(count for reader, count in found["records_read"].items() if reader != READER_FINAL)
    outcomes = f"{found['committed']} committed, {found['aborted']} aborted, {found['unknown']} unknown"
    in_the_end = found["records_read"].get(READER_FINAL, 0)
    lines = [
        f"operations        {found['operations']}: {outcomes} ({found['asked_later']} known only after asking)",
        f"faults            {_told(found['faults'])}",
        f"without effect    {_told(found['faults_without_effect'])}",
        f"longest silence   {found['longest_unavailable_s']:.1f} s without any commit to Kafka",
        f"Kafka             {read} records read on the way, {in_the_end} in the end",
        f"markers           {found['markers']['commit']} commit, {found['markers']['abort']} abort",
        f"copies            {found['copies']} of the lists",
        f"log               {_compacted(found['log'])}",
        f"PostgreSQL        {found['looks']} looks on the way, {found['rows']} rows in the end",
    ]
    if not found["finished"]:
        lines.append("unfinished        there is no final read: what should be there in the end was not checked")
    lines.append(f"anomalies         {len(findings)}{'' if found['finished'] else ' in what there is of it'}")
    for of_check in _by_check(findings):
        for finding in of_check[:SHOWN_PER_CHECK_MAX]:
            lines.append(f"{finding.check}: {finding.text}")
            lines += [f"    {line}" for line in finding.proof]
        if len(of_check) > SHOWN_PER_CHECK_MAX:
            lines.append(f"{of_check[0].check}: {len(of_check) - SHOWN_PER_CHECK_MAX} more")
    return "\n".join(lines)


def _by_check(findings: list[Finding]) -> list[list[Finding]]:
    return [list(of_check) for _, of_check in groupby(findings, key=attrgetter("check"))]


def _counted(faults: Iterable[Fault]) -> dict[str, int]:
    return dict(sorted(Counter(fault.fault for fault in faults).items()))


def _compacted(log: Mapping[str, int]) -> str:
    return f"{log['left']} of {log['written']} records left by its compaction" if log else "not read"


def _told(faults: Mapping[str, int]) -> str:
    listed = ", ".join(f"{name} {count}" for name, count in faults.items())
    return f"{sum(faults.values())}: {listed}" if listed else "0"
