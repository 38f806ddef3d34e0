"""Findings of a full run → a plan: which rows would be written from which record, which deleted. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oncebox.settings import kafka_settings
from spark_jobs.records import row_values, to_json
from spark_jobs.repair import FORMAT
from spark_jobs.settle import Settler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from spark_jobs.config import ReconcileSettings
    from spark_jobs.cut import Cut
    from spark_jobs.findings import Settled, TableResult
    from spark_jobs.records import Record
    from spark_jobs.result import Result
    from spark_jobs.settle import Place
    from spark_jobs.targets import Table


def make_plan(
    settings: ReconcileSettings,
    *,
    limit: int,
    progress: Callable[[str], None],
    session: SparkSession | None = None,
) -> dict[str, Any]:
    from spark_jobs.reconcile import reconcile
    from spark_jobs.session import used_session
    from spark_jobs.snapshot import Snapshot

    with used_session(settings, session) as spark:
        result, cut, tables = reconcile(spark, settings.model_copy(update={"full": True}), progress)
        kafka = kafka_settings(settings.kafka, client_id="oncebox-reconcile")
        settler = Settler(spark, kafka, Snapshot(""), cut)
        return plan_of(result, cut, tables, settler, limit)


def plan_of(result: Result, cut: Cut, tables: Sequence[TableResult], settler: Settler, limit: int) -> dict[str, Any]:
    actions: list[dict[str, Any]] = []
    left_out: list[str] = []
    for table in tables:
        description = next(each for each in cut.tables if each.name == table.table)
        wrong = [each for each in table.settled if each.kind is not None]
        if not wrong:
            continue
        if any(target.unchecked for target in description.targets):
            left_out.append(f"{table.table}: has columns that cannot be recomputed; mend it by a rebuild of the relay")
            continue
        room = limit - len(actions)
        if len(wrong) > room:
            left_out.append(
                f"{table.table}: {len(wrong) - room} rows beyond the limit of {limit}; plan again afterwards"
            )
        wrong = wrong[:room]
        places = {each.suspect.expected for each in wrong if each.suspect.expected is not None}
        records = settler.records(places, is_committed=True)
        for each in wrong:
            action = action_for(each, description, records)
            if action is None:
                left_out.append(f"{table.table} {each.suspect.key_text}: its record cannot be read any more")
            else:
                actions.append(action)
    return {
        "format": FORMAT,
        "kind": "plan",
        "relay": cut.relay,
        "config_hash": result.config_hash,
        "lsn": cut.lsn,
        "applied": {str(each.position.source): [list(one) for one in each.position.applied] for each in cut.sources},
        "letters_replayed": cut.letters_replayed,
        "verdict": str(result.verdict),
        "sentence": result.sentence,
        "unchecked": list(result.unchecked),
        "actions": actions,
        "left_out": left_out,
    }


def action_for(settled: Settled, table: Table, records: Mapping[Place, Record]) -> dict[str, Any] | None:
    """A row is deleted only where its key should have none; None: nobody can tell any more what it should be."""
    suspect = settled.suspect
    why = "; ".join(part for part in (str(settled.kind.value if settled.kind else ""), settled.detail) if part)
    base = {
        "table": table.name,
        "key_text": suspect.key_text,
        "found": None if suspect.found is None else list(suspect.found),
        "copies": suspect.copies,
        "digest": suspect.digest,
        "why": why,
    }
    if suspect.expected is None:
        return {"do": "delete", **base}
    record = records.get(suspect.expected)
    target = next((each for each in table.targets if record is not None and each.topic == record.topic), None)
    if record is None or target is None:
        return None
    try:
        is_delete = row_values(target, record) is None
    except ValueError:
        return None
    if is_delete:
        return {"do": "delete", **base}
    return {"do": "write", **base, "source": suspect.expected[0], "record": to_json(record)}
