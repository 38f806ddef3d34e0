"""The checks of real histories by name, and the one function that runs them all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from proof.chaos import checks_database, checks_kafka, checks_markers, checks_outcomes, checks_watchers
from proof.chaos.book import Book
from proof.chaos.checks_kafka import Anomaly

# One bug makes many anomalies of one name: all are counted, the first ones tell all. A proof may be long, too.
SHOWN_PER_CHECK_MAX = 3
PROOF_LINES_MAX = 12

CHECKS: dict[str, Callable[[Book], Iterator[Anomaly]]] = {
    "duplicate": checks_kafka.duplicate,
    "aborted read": checks_kafka.aborted_read,
    "read before commit": checks_kafka.read_before_commit,
    "lost write": checks_kafka.lost_write,
    "unseen after the final read": checks_kafka.unseen,
    "torn transaction": checks_kafka.torn_transaction,
    "inconsistent offsets": checks_kafka.inconsistent_offsets,
    "step back": checks_kafka.step_back,
    "skip": checks_kafka.skip,
    "order": checks_kafka.order,
    "money in Kafka": checks_kafka.money,
    "copy": checks_kafka.copied,
    "duplicate row": checks_database.row_twice,
    "aborted row": checks_database.aborted_row,
    "torn transaction in PostgreSQL": checks_database.torn_transaction,
    "step back in PostgreSQL": checks_database.step_back,
    "money in PostgreSQL": checks_database.money,
    "row without record": checks_database.row_without_record,
    "record without row": checks_database.record_without_row,
    "row unlike its record": checks_database.other_amount,
    "decision divergence": checks_outcomes.decision_divergence,
    "marker unlike its decision": checks_markers.unlike_decision,
    "cross-transaction capture": checks_markers.capture,
    "number used twice": checks_outcomes.number_twice,
    "unknown outcome": checks_outcomes.unknown_outcome,
    "hanging transaction": checks_outcomes.hanging_transaction,
    "no progress": checks_outcomes.no_progress,
    "stuck": checks_outcomes.stuck,
    "blind watcher": checks_watchers.blind,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    text: str
    # Lines of the history; none beyond the first few of a check.
    proof: tuple[str, ...]


def check(book: Book) -> list[Finding]:
    """All that there are, those of one check together."""
    return [
        Finding(check=name, text=text, proof=tuple(proof[:PROOF_LINES_MAX] if nth < SHOWN_PER_CHECK_MAX else ()))
        for name, run in CHECKS.items()
        for nth, (text, proof) in enumerate(run(book))
    ]
