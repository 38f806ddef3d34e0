"""What can be wrong, who is to blame for it, and how a run says so. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    ROW_MISSING = "row missing"
    ROW_EXTRA = "row extra"
    ROW_DIFFERS = "row differs"
    ROW_OLDER = "row older than its record"
    DUPLICATE = "duplicate"
    ATOMICITY_BROKEN = "atomicity broken"
    ABORTED_DATA = "aborted data present"
    MANIFEST_DIFFERS = "manifest differs from topic"
    LOG_DIFFERS = "log differs from feed"
    HANGING_TRANSACTION = "hanging transaction"
    GROUP_OFFSET_BEYOND = "group offset beyond the committed point"


# Who, why, and what to do.
BLAME: dict[Kind, tuple[str, str, str]] = {
    Kind.ROW_MISSING: (
        "database",
        "the relay's position is past the record, so the row was written; somebody else deleted it",
        "oncebox reconcile repair writes it again from its record",
    ),
    Kind.ROW_EXTRA: (
        "database",
        "no committed record stands behind the row; somebody else inserted it",
        "oncebox reconcile repair deletes it",
    ),
    Kind.ROW_DIFFERS: (
        "database",
        "the row still names the record that wrote it, but not its values: somebody else changed it",
        "oncebox reconcile repair writes the record's values",
    ),
    Kind.ROW_OLDER: (
        "database",
        "a newer record of the row was applied; a restore or a hand has put an old version back",
        "oncebox reconcile repair writes the newest version (or deletes the row, if that is the newest)",
    ),
    Kind.DUPLICATE: (
        "database",
        "one record stands in several rows; a copy was inserted past the relay",
        "oncebox reconcile repair keeps one of them, as its record says",
    ),
    Kind.ATOMICITY_BROKEN: (
        "relay or database",
        "a part of the transaction is in the database and another part is not",
        "oncebox reconcile repair puts back what was there, the relay applies the whole; if it comes again, report it",
    ),
    Kind.ABORTED_DATA: (
        "whoever wrote the row",
        "the row names a record of an aborted or open transaction: it was read without read_committed",
        "oncebox reconcile repair deletes it or puts back what it replaced; find the reader that is not read_committed",
    ),
    Kind.MANIFEST_DIFFERS: (
        "feed",
        "the manifest claims offsets without committed records: somebody else wrote the feed, or markers contradict it",
        "check who may write the feed (ACL); compare with the coordinator's GetOutcome",
    ),
    Kind.LOG_DIFFERS: (
        "coordinator",
        "the log and the feed tell different outcomes of one transaction",
        "stop writers of this transactional id and compare the log with the feed before anything else",
    ),
    Kind.HANGING_TRANSACTION: (
        "producer",
        "a transaction has been open for long; read_committed readers wait behind it",
        "see whose it is with the command given: what is prepared or decided must not be ended by hand",
    ),
    Kind.GROUP_OFFSET_BEYOND: (
        "feed",
        "a manifest gives a consumer group an offset that the partition does not have yet",
        "check who may write the feed (ACL), and reset the group's offset",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One example. For a row: its key and the records concerned; for the rest: in words."""

    key: dict[str, Any] = field(default_factory=dict)
    key_text: str = ""
    expected: str = ""  # topic:partition:offset
    found: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    kind: Kind
    where: str  # a table, or topic:partition
    count: int
    samples: tuple[Sample, ...] = ()
    how: str = ""  # "about" or "at least": not each was looked at

    @property
    def amount(self) -> str:
        return f"{self.how} {self.count}".lstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A row, or the place of one, that the comparison does not like. Settled one by one."""

    key_text: str
    expected: tuple[int, int] | None  # source, offset
    found: tuple[int | None, int | None] | None
    copies: int
    opinion: str
    digest: int | None = None  # of the row; of several copies their sum
    expected_digest: int | None = None  # None: Spark cannot tell, or there should be no row
    is_delete: bool = False  # the expected record deletes the row


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """`kind` None: nothing is wrong after all."""

    suspect: Suspect
    kind: Kind | None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    table: str
    rows_expected: int = 0
    rows_found: int = 0
    buckets: int = 0
    buckets_differing: int = 0
    findings: tuple[Finding, ...] = ()
    settled: tuple[Settled, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)  # suspects by opinion
    is_more_outside: bool = False  # rows outside of the cut that were not looked at are not among them
    notes: tuple[str, ...] = ()
    superseded: int = 0
    touched: int = 0
