"""The checks by name, and the one function that runs them all."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from proof.checker import course, endings, feed, ownership, reads
from proof.checker.history import Event
from proof.checker.index import Index

# One bug makes many findings of one name: the first ones tell all.
FINDINGS_PER_CHECK_MAX = 3

CHECKS: dict[str, Callable[[Index], Iterator[str]]] = {
    "aborted read": reads.aborted_read,
    "read before commit": reads.read_before_commit,
    "lost write": reads.lost_write,
    "duplicate": reads.duplicate,
    "inconsistent offsets": reads.inconsistent_offsets,
    "step back": reads.step_back,
    "decision divergence": endings.decision_divergence,
    "marker before decision": endings.marker_before_decision,
    "marker before manifest": endings.marker_before_manifest,
    "torn transaction": endings.torn_transaction,
    "cross-transaction capture": endings.cross_transaction_capture,
    "hanging transaction": endings.hanging_transaction,
    "unknown outcome": endings.unknown_outcome,
    "stale owner accepted": ownership.stale_owner,
    "number reused": ownership.number_reused,
    "fenced without cause": ownership.fenced_without_cause,
    "stale answer": ownership.stale_answer,
    "resume token going back": ownership.resume_token_back,
    "acknowledged but absent after replay": ownership.absent_after_replay,
    "manifest": feed.manifest,
    "stuck": course.stuck,
    "blocked by a stranger": course.blocked_by_stranger,
    "broken": course.broken,
    "memory is not the log": course.memory_is_not_the_log,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    text: str


def check(history: Iterable[Event]) -> list[Finding]:
    index = Index(history)
    return [
        Finding(check=name, text=text)
        for name, run in CHECKS.items()
        for text in islice(run(index), FINDINGS_PER_CHECK_MAX)
    ]
