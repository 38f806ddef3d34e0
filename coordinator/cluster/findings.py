"""What a look at the cluster brings to light: findings, and their text for people.

A finding is data: what was found, why it matters, and the commands that mend it. Nothing here does I/O.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from textwrap import indent, wrap
from typing import Final

WIDTH: Final = 110
MARGIN: Final = 9


class Severity(IntEnum):
    """Higher is worse."""

    OK = 0
    NOTE = 1  # worth knowing; never a reason to refuse
    WARNING = 2  # acknowledged data could be lost with a broker, or that cannot be ruled out; refused if strict
    PROBLEM = 3  # exactly-once is impossible like this; always refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    severity: Severity
    what: str
    why: str = ""
    # Commands, to be run in this order; a line that starts with # says what no command can do.
    mend: tuple[str, ...] = ()


class ClusterError(Exception):
    """The cluster is not as the coordinator needs it, or does not let us see or make it so."""


def refuse(findings: Iterable[Finding], *, strict: bool) -> None:
    """Raises ClusterError with all that forbids a start: problems, and if strict warnings too."""
    limit = Severity.WARNING if strict else Severity.PROBLEM
    refused = [finding for finding in findings if finding.severity >= limit]
    if refused:
        because = " (warnings count because `strict` is set)" if strict else ""
        raise ClusterError(f"this Kafka cluster is not fit for the coordinator{because}:\n{render(refused)}")


def render(findings: Iterable[Finding]) -> str:
    """As text, the worst first."""
    return "\n".join(_paragraph(each) for each in sorted(findings, key=lambda each: -each.severity))


def _paragraph(finding: Finding) -> str:
    name = finding.severity.name
    label = name.lower() if finding.severity <= Severity.NOTE else name
    lines = [f"{label:<{MARGIN}}{finding.what}"]
    lines += [indent(line, " " * MARGIN) for line in wrap(finding.why, WIDTH - MARGIN)]
    lines += [indent(command, " " * (MARGIN + 2)) for command in finding.mend]
    return "\n".join(lines)
