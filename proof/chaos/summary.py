"""A history and its findings in a few lines, and as JSON."""

from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from proof.chaos.book import READER_FINAL, Book, counts
from proof.chaos.checks import Finding
from proof.chaos.history import COMMITTED, UNKNOWN


def longest_gap_s(book: Book) -> float:
    """The longest time without any commit, while clients worked."""
    commits = sorted(
        line.event.at_ns
        for operation in book.operations.values()
        for line, told in operation.told
        if told.outcome == COMMITTED and told.by == operation.invoke.client
    )
    gaps = [after - before for before, after in pairwise(commits)]
    return max(gaps, default=0) / 1e9


def as_json(book: Book, findings: list[Finding]) -> dict[str, Any]:
    return {
        **counts(book),
        "seconds": (book.ended_ns - book.began_ns) / 1e9,
        "faults": dict(sorted(Counter(fault.fault for fault in book.faults).items())),
        "longest_unavailable_s": longest_gap_s(book),
        "records_read": {reader: len(seen) for reader, seen in book.seen.items()},
        "copies": len(book.copies or ()),
        "rows": sum(len(rows) for rows in book.rows.values()),
        "looks": len(book.looks),
        "asked_later": sum(
            any(told.outcome == UNKNOWN for _, told in each.told) or each.told[0][1].by != each.invoke.client
            for each in book.operations.values()
            if each.told
        ),
        "finished": book.finished is not None,
        "anomalies": [asdict(finding) for finding in findings],
    }


def as_text(book: Book, findings: list[Finding]) -> str:
    found = as_json(book, findings)
    faults = ", ".join(f"{name} {count}" for name, count in found["faults"].items()) or "none"
    read = sum(count for reader, count in found["records_read"].items() if reader != READER_FINAL)
    outcomes = f"{found['committed']} committed, {found['aborted']} aborted, {found['unknown']} unknown"
    in_the_end = found["records_read"].get(READER_FINAL, 0)
    lines = [
        f"operations        {found['operations']}: {outcomes} ({found['asked_later']} known only after asking)",
        f"faults            {sum(found['faults'].values())}: {faults}",
        f"longest silence   {found['longest_unavailable_s']:.1f} s without any commit",
        f"Kafka             {read} records read on the way, {in_the_end} in the end",
        f"copies            {found['copies']} of the lists",
        f"PostgreSQL        {found['looks']} looks on the way, {found['rows']} rows in the end",
    ]
    if not found["finished"]:
        lines.append("unfinished        there is no final read: what should be there in the end was not checked")
    lines.append(f"anomalies         {len(findings)}")
    for finding in findings:
        lines.append(f"{finding.check}: {finding.text}")
        lines += [f"    {line}" for line in finding.proof]
    return "\n".join(lines)
