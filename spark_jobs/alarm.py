"""Settled rows → findings. What is wrong is looked at once more, in a snapshot of its own, before it is told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from spark_jobs.database import RowState, decode_key, identity, row_states
from spark_jobs.findings import Finding, Kind, Sample, Settled
from spark_jobs.snapshot import Snapshot, as_mapping, read_positions
from spark_jobs.transforms.difference import EXTRA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spark_jobs.compare import Run
    from spark_jobs.cut import Position
    from spark_jobs.findings import Suspect
    from spark_jobs.targets import Table

RIGHT_NOW = "right at a second look"


def looked_at_again(run: Run, table: Table, settled: Sequence[Settled]) -> list[Settled]:
    """The same rows under a new snapshot and its positions: one that has become right meanwhile is no alarm."""
    wrong = {identity(table, each.suspect) for each in settled if each.kind is not None}
    if not wrong:
        return list(settled)
    with Snapshot(run.settings.postgres.dsn.get_secret_value()) as later:
        states = row_states(later, table, wrong)
        positions = {each.source: each for each in read_positions(later, run.cut.relay)}
    before = {source.position.source: source.position for source in run.cut.sources}
    return [
        replace(each, kind=None, detail=RIGHT_NOW)
        if each.kind is not None
        and is_right_now(each.suspect, states.get(identity(table, each.suspect), RowState()), before, positions)
        else each
        for each in settled
    ]


def is_right_now(
    suspect: Suspect, state: RowState, before: Mapping[int, Position], positions: Mapping[int, Position]
) -> bool:
    """Whether the row has become what it should be, or the relay has written a newer record over it since the cut."""
    if (state.copies, state.digest) == (suspect.copies, suspect.digest):
        return False
    if state.copies == 0:
        return suspect.expected is None or suspect.is_delete
    if state.copies > 1:
        return False
    if suspect.expected_digest is not None and state.digest == suspect.expected_digest:
        return True
    number, offset = state.place
    if number is None or offset is None or number not in positions:
        return False
    was_applied = number in before and before[number].has_applied(offset)
    return positions[number].has_applied(offset) and not was_applied


def table_findings(
    run: Run, table: Table, settled: Sequence[Settled], counts: Mapping[str, int], *, is_more_outside: bool = False
) -> list[Finding]:
    """Counts are of all suspects; those beyond the limit are taken to be what the settled ones of their opinion are."""
    looked_at: dict[str, int] = {}
    kinds: dict[tuple[str, Kind], list[Settled]] = {}
    for each in settled:
        opinion = each.suspect.opinion
        looked_at[opinion] = looked_at.get(opinion, 0) + 1
        if each.kind is not None:
            kinds.setdefault((opinion, each.kind), []).append(each)
    totals: dict[Kind, int] = {}
    samples: dict[Kind, list[Sample]] = {}
    how: dict[Kind, str] = {}
    for (opinion, kind), members in kinds.items():
        share = len(members) / looked_at[opinion]
        count = counts.get(opinion, looked_at[opinion])
        totals[kind] = totals.get(kind, 0) + max(round(count * share), 1)
        if count > looked_at[opinion]:
            how[kind] = "about"
        elif is_more_outside and opinion == EXTRA:
            how.setdefault(kind, "at least")
        taken = samples.setdefault(kind, [])
        taken += [_sample(run, table, each) for each in members[: run.settings.samples_max - len(taken)]]
    return [
        Finding(kind=kind, where=table.name, count=count, samples=tuple(samples[kind]), how=how.get(kind, ""))
        for kind, count in totals.items()
    ]


def _sample(run: Run, table: Table, settled: Settled) -> Sample:
    suspect = settled.suspect
    values = decode_key(table.first, suspect.key_text) if suspect.key_text else None
    by_number = as_mapping(run.cut.sources)

    def place(which: tuple[int | None, int | None] | None) -> str:
        if which is None or which[0] is None:
            return ""
        source = by_number.get(which[0])
        named = f"{source.position.topic}:{source.position.partition}" if source else f"source {which[0]}"
        return f"{named}:{which[1]}"

    return Sample(
        key=dict(zip((column.name for column in table.first.key), values or [], strict=False)),
        key_text=suspect.key_text,
        expected=place(suspect.expected),
        found=place(suspect.found),
        detail=settled.detail,
    )
