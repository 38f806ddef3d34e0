"""What a run found, as one document: the JSON file, the HTML page, the table's row and the metrics are made of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from spark_jobs.findings import BLAME
from spark_jobs.verdict import EXIT_CODES, Verdict

if TYPE_CHECKING:
    from spark_jobs.findings import Finding

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """One partition: what was applied, and how much of it was compared."""

    topic: str
    partition: int
    source: int
    log_start: int
    start: int
    verified: int  # by earlier runs
    next: int
    stable: int
    high: int
    compared: int  # offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFigures:
    table: str
    rows_expected: int
    rows_found: int
    buckets: int
    buckets_differing: int
    superseded: int
    touched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    verdict: Verdict
    sentence: str
    kind: str  # full or incremental
    since_run: int | None
    relay: str
    mode: str
    started_at_ms: int
    duration_ms: int
    snapshot: str
    xmin: int
    lsn: str
    config_hash: str
    feed: dict[str, tuple[int, int]]
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]
    told: tuple[str, ...]  # no gap in what the verdict says, and yet worth a word
    parked: dict[str, int]
    lag: int
    transactions: int
    tables: tuple[TableFigures, ...]
    coverage: tuple[Coverage, ...]
    run: int | None = None
    steps_ms: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(table.rows_found for table in self.tables)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


def to_json(result: Result) -> dict[str, Any]:
    document = {"format": FORMAT, "exit_code": result.exit_code, **asdict(result)}
    for finding in document["findings"]:
        who, why, remedy = BLAME[finding["kind"]]
        finding |= {"kind": str(finding["kind"]), "blame": who, "why": why, "remedy": remedy}
    document["verdict"] = str(result.verdict)
    return document
