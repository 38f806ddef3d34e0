"""Carries a repair plan out, and undoes one. In one transaction, behind the relay's own fence.

Raising the fence makes every commit of a relay that is under way fail, so nothing can be written between our look at a
row and our change of it; a running relay takes its partitions again by itself. A row that is not as the plan found it
(by its digest) is left alone, and carrying a plan or its undo out twice changes nothing the second time. So is a row
that was ahead of the relay, once the relay has come that far: the guard keeps such a row as it is, right or wrong. Of a
table without the guard's columns nobody remembers deletes: it is left alone once the relay has applied more since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.errors import ForeignKeyViolation, LockNotAvailable, RestrictViolation

from spark_jobs.applied import Applied, has, is_new, overtaken
from spark_jobs.database import OFFSET, SOURCE, digest_sql, identities_condition, record_digests
from spark_jobs.errors import ReconcileError
from spark_jobs.followers import FollowersError, refuse_followers
from spark_jobs.queries import query
from spark_jobs.records import from_json, row_values
from spark_jobs.targets import Table, by_table, config_hash, read_target
from spark_jobs.values import AS_THE_RELAY, value_sql

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spark_jobs.database import Ask, Identity
    from spark_jobs.targets import Target

OWNER = "oncebox reconcile repair"
FORMAT = 2
UNDO_FORMAT = 3
LOCK_WAIT_MS = 60_000
# A row refers to nothing, or is referred to. (The latter under RESTRICT has an error of its own since PostgreSQL 18.)
REFERENCES = (ForeignKeyViolation, RestrictViolation, FollowersError)
MOVED = (
    "the relay has applied more since the plan was made, and a table without the guard's columns does not tell what: "
    "pause the relay (oncebox relay pause) and plan again"
)
OVERTAKEN = (
    "the relay has applied its record since the plan was made, or one before it, which the row has kept out: plan "
    "again (where that happens each time, with the relay paused: oncebox relay pause)"
)
UNAPPLIED = (
    "its record is not among what the relay has applied any more (it was rewound since the plan was made, or its "
    "tables were rebuilt): plan again"
)
IsNew = Callable[[int, int], bool]  # of a record, by its source and offset
Connection = psycopg.Connection[Any]


class _RollBack(Exception):  # noqa: N818 - no error: a dry run ends so
    pass


def apply_plan(
    dsn: str, plan: Mapping[str, Any], *, keep: Callable[[dict[str, Any]], None], is_dry: bool = False
) -> dict[str, Any]:
    """How many rows were changed, and which were left alone and why. `keep` is given the document that undoes it before
    anything is committed: where it cannot be kept, nothing is changed.
    """
    if not _is_document(plan, "plan", FORMAT, ("relay", "config_hash", "applied", "letters_replayed", "actions")):
        raise ReconcileError("this file is no repair plan: make one with oncebox reconcile plan")
    done: list[dict[str, Any]] = []
    skipped: list[str] = []
    try:
        with _one_transaction(dsn) as connection:
            tables = _prepared(connection, plan["relay"], plan["config_hash"])
            moved, now = _moved(connection, plan)
            seen = {int(source): [(one[0], one[1]) for one in each] for source, each in plan["applied"].items()}

            def problem_of(action: Mapping[str, Any]) -> str | None:
                table = tables.get(action["table"])
                if table is None:
                    return "its table is gone"
                if not table.first.guard and moved & set(table.topics):
                    return MOVED
                if table.first.guard and overtaken(action["found"], seen, now):
                    return OVERTAKEN
                if action["do"] == "write" and not has(now, action["source"], action["record"]["offset"]):
                    return UNAPPLIED
                return _carry_out(connection, table, action, done, partial(is_new, seen=seen, now=now))

            for action, problem in _in_any_order(connection, plan["actions"], problem_of):
                if problem:
                    skipped.append(f"{action['table']} {action['key_text']}: {problem}")
            if is_dry:
                raise _RollBack
            if done:
                undo = {name: plan[name] for name in ("relay", "config_hash")}
                keep({"format": UNDO_FORMAT, "kind": "undo", **undo, "rows": done})
    except _RollBack:
        pass
    return {"done": len(done), "skipped": skipped}


def _in_any_order(
    connection: Connection, actions: Sequence[Mapping[str, Any]], problem_of: Callable[[Mapping[str, Any]], str | None]
) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Each action, and what kept it from being done. One that a foreign key forbids may need another to be done first:
    it is tried again after the others, as long as some of them are done.
    """
    while actions:
        forbidden: list[Mapping[str, Any]] = []
        why: Exception | None = None
        for action in actions:
            try:
                with connection.transaction():
                    problem = problem_of(action)
            except REFERENCES as error:
                forbidden.append(action)
                why = error
            else:
                yield action, problem
        if why is not None and len(forbidden) == len(actions):
            raise why
        actions = forbidden


def apply_undo(dsn: str, undo: Mapping[str, Any], *, is_dry: bool = False) -> int:
    """Puts back the rows as they were; those that are not as the repair left them stay as they are."""
    names = ("relay", "config_hash", "rows")
    if _is_document(undo, "undo", FORMAT, names):
        raise ReconcileError(
            "this undo file is of an earlier version of oncebox, whose undo files do not have every value as it was: "
            "undo it with the version that wrote it"
        )
    if not _is_document(undo, "undo", UNDO_FORMAT, names):
        raise ReconcileError("this file is no undo file: a repair writes one (--undo-file)")
    count = 0
    try:
        with _one_transaction(dsn) as connection:
            tables = _prepared(connection, undo["relay"], undo["config_hash"])
            for row in reversed(undo["rows"]):
                count += _put_back(connection, tables[row["table"]], row)
            if is_dry:
                raise _RollBack
    except _RollBack:
        pass
    return count


def _is_document(document: Any, kind: str, version: int, names: Sequence[str]) -> bool:
    """Whether it is what we have written: a file may hold anything."""
    if not isinstance(document, dict) or not document.keys() >= set(names):
        return False
    return document.get("format") == version and document.get("kind") == kind


@contextmanager
def _one_transaction(dsn: str) -> Iterator[Connection]:
    """The relay stands still behind its fence, so that nobody is waited for without end."""
    try:
        with psycopg.connect(dsn) as connection, connection.transaction():
            connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(LOCK_WAIT_MS))
            yield connection
    except LockNotAvailable as error:
        raise ReconcileError(
            f"somebody else has locked what is to be changed, for {LOCK_WAIT_MS / 1000:g} s by now, and the relay "
            "waits meanwhile: nothing is changed, try again"
        ) from error


def _prepared(connection: Connection, relay: str, wanted_hash: str) -> dict[str, Table]:
    connection.execute(AS_THE_RELAY)
    tables = _tables(connection, relay, wanted_hash)
    raise_fence(connection, relay, OWNER)
    return tables


def _moved(connection: Connection, plan: Mapping[str, Any]) -> tuple[set[str], Applied]:
    """The topics of which the relay has applied more, or less, than the plan has seen; and what it has applied."""
    positions = connection.execute(query("positions"), {"relay": plan["relay"]}).fetchall()
    letters = connection.execute(query("letters_counted"), {"relay": plan["relay"]}).fetchone()
    is_replayed = letters is None or letters[1] != plan.get("letters_replayed")
    moved: set[str] = set()
    now: Applied = {}
    for source, topic, _, _, start, next_offset, beyond, *_ in positions:
        now[source] = [(start, next_offset), *((first, last) for first, last in beyond)]
        if is_replayed or plan["applied"].get(str(source)) != [list(each) for each in now[source]]:
            moved.add(topic)
    return moved, now


def raise_fence(connection: Connection, relay: str, owner: str) -> None:
    """From here to our commit no relay process can commit; those that try are told by whom they were fenced."""
    row = connection.execute(
        "UPDATE oncebox.relay SET fence = fence + 1, owner = NULL, owner_since = now() WHERE relay = %s "
        "RETURNING fence, mode",
        [relay],
    ).fetchone()
    if row is None:
        raise ReconcileError(f"this database knows no relay {relay!r}")
    fence, mode = row
    if mode == "transaction":
        connection.execute("UPDATE oncebox.position SET fence = %s, owner = %s WHERE relay = %s", [fence, owner, relay])
        connection.execute("UPDATE oncebox.feed_position SET fence = %s WHERE relay = %s", [fence, relay])
    else:
        connection.execute(
            "UPDATE oncebox.position SET fence = fence + 1, owner = %s, owner_since = now() WHERE relay = %s",
            [owner, relay],
        )


def _tables(connection: Connection, relay: str, wanted_hash: str) -> dict[str, Table]:
    mappings = connection.execute(query("targets"), {"relay": relay}).fetchall()
    if config_hash([(row[0], row[1], row[2], row[3]) for row in mappings]) != wanted_hash:
        raise ReconcileError("the relay's mapping has changed since the plan was made: make a new one")
    return {table.name: table for table in by_table([read_target(*row) for row in mappings])}


def _carry_out(
    connection: Connection, table: Table, action: Mapping[str, Any], done: list[dict[str, Any]], is_new: IsNew
) -> str | None:
    """What kept it from being done; None: it is done, and noted."""
    relation = sql.Identifier(table.schema, table.table)
    who = _identity(table, action)
    place = identities_condition(table, [who])
    before = _rows(connection, table, place)
    if len(before) != action["copies"]:
        return "there is a row now" if not action["copies"] else "the row was changed since" if before else "it is gone"
    if before and sum(digest for _, digest in before) != action["digest"]:
        return "the row was changed since"
    written = None
    if action["do"] == "delete":
        refuse_followers(connection, table.schema, table.table, place)
        connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(relation, place))
    else:
        try:
            written = _write(connection, table, action, place, is_new, is_there=bool(before))
        except _LeftAlone as problem:
            return str(problem)
    done.append(
        {
            "table": table.name,
            "identity": who if isinstance(who, str) else list(who),
            "before": [{"columns": row, "digest": digest} for row, digest in before],
            "written": written,
        }
    )
    return None


class _LeftAlone(Exception):  # noqa: N818 - no error: the row stays as it is
    pass


def _columns(connection: Connection, table: Table) -> dict[str, str]:
    """The table's own columns with their types, without those that PostgreSQL computes."""
    name = sql.Identifier(table.schema, table.table).as_string(connection)
    listed = connection.execute(query("columns"), {"table": name}).fetchall()
    return {column: kind for column, kind, is_generated in listed if not is_generated}


def _rows(connection: Connection, table: Table, place: sql.Composable) -> list[tuple[dict[str, str | None], int]]:
    """The rows there, locked: each value as its own type's text, which that type reads again, and the row's digest.
    (JSON has no word for an array's bounds or a jsonb null, and cannot be read with a NUL in a json document.)
    """
    names = list(_columns(connection, table))
    texts = sql.SQL(", ").join(sql.SQL("t.{}::text").format(sql.Identifier(name)) for name in names)
    found = connection.execute(
        sql.SQL("SELECT ARRAY[{}], {} FROM {} AS t WHERE {} FOR UPDATE").format(
            texts, digest_sql(table.first), sql.Identifier(table.schema, table.table), place
        )
    ).fetchall()
    return [(dict(zip(names, row[0], strict=True)), row[1]) for row in found]


def _identity(table: Table, action: Mapping[str, Any]) -> Identity:
    if table.first.is_keyed:
        key_text: str = action["key_text"]
        return key_text
    source, offset = action["found"] or (action["source"], action["record"]["offset"])
    return source, offset


def _write(
    connection: Connection,
    table: Table,
    action: Mapping[str, Any],
    place: sql.Composable,
    is_new: IsNew,
    *,
    is_there: bool,
) -> int:
    """The digest of the row that stands there now."""
    source, record = action["source"], from_json(action["record"])
    target = next((each for each in table.targets if each.topic == record.topic), None)
    if target is None:
        raise _LeftAlone(f"the topic {record.topic} feeds it no more")
    (digest,) = record_digests(_asker(connection), target, [(source, record)])
    values = row_values(target, record)
    if digest is None or values is None:
        raise _LeftAlone("PostgreSQL makes no row of its record")
    made = [value_sql(column, value) for column, value in zip(target.columns, values, strict=True)]
    deletes = _deletes(connection, table, target, dict(zip(target.columns_named, made, strict=True)))
    # Also of another partition, if the key has moved there: which of two partitions is newer no offset tells.
    if any((each == source and offset > record.offset) or is_new(each, offset) for each, offset in deletes):
        raise _LeftAlone("a newer record has deleted it")
    names = [sql.Identifier(name) for name in target.columns_named]
    if target.guard:
        names += [sql.Identifier(SOURCE), sql.Identifier(OFFSET)]
        made += [sql.Literal(source), sql.Literal(record.offset)]
    relation = sql.Identifier(table.schema, table.table)
    if is_there:
        # Of several copies one is kept: it may have columns that are not the relay's.
        connection.execute(
            sql.SQL(
                "DELETE FROM {t} WHERE {place} AND (tableoid, ctid) <> (SELECT tableoid, ctid FROM {t} WHERE {place} "
                "LIMIT 1)"
            ).format(t=relation, place=place)
        )
        changes = sql.SQL(", ").join(sql.SQL("{} = {}").format(*each) for each in zip(names, made, strict=True))
        connection.execute(sql.SQL("UPDATE {} SET {} WHERE {}").format(relation, changes, place))
    else:
        connection.execute(
            sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
                relation, sql.SQL(", ").join(names), sql.SQL(", ").join(made)
            )
        )
    if [each for _, each in _rows(connection, table, place)] != [digest]:
        raise ReconcileError(
            f"{table.name} {action['key_text']}: the row does not read as its record; all is rolled back"
        )
    return digest


def _asker(connection: Connection) -> Ask:
    def ask(statement: sql.Composed) -> list[tuple[Any, ...]]:
        with connection.transaction():  # a value that PostgreSQL refuses must not end the whole repair
            return list(connection.execute(statement).fetchall())

    return ask


def _deletes(
    connection: Connection, table: Table, target: Target, made: Mapping[str, sql.Composable]
) -> list[tuple[int, int]]:
    """Source and offset of the deletes of this row that are remembered."""
    if not target.is_keyed:
        return []
    key = sql.SQL(", ").join(made[column.name] for column in target.key)
    return connection.execute(
        sql.SQL(
            "SELECT source, record_offset FROM oncebox.tombstone WHERE target_table = {} "
            "AND row_key = jsonb_build_array({})"
        ).format(sql.Literal(f'"{table.schema}"."{table.table}"'), key)
    ).fetchall()


def _put_back(connection: Connection, table: Table, row: Mapping[str, Any]) -> int:
    relation = sql.Identifier(table.schema, table.table)
    who = row["identity"]
    place = identities_condition(table, [who if isinstance(who, str) else tuple(who)])
    now = [digest for _, digest in _rows(connection, table, place)]
    if now != ([] if row["written"] is None else [row["written"]]):
        return 0
    kinds, before = _columns(connection, table), row["before"]
    if len(now) == len(before) == 1:
        # Only what the repair has written: other columns may be newer by now, and a delete takes with it what refers to
        # the row.
        guard = (SOURCE, OFFSET) if table.first.guard else ()
        names = [name for name in (*table.first.columns_named, *guard) if name in kinds]
        values = _values(kinds, names, before[0]["columns"])
        changes = sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(name), value) for name, value in zip(names, values, strict=True)
        )
        connection.execute(sql.SQL("UPDATE {} SET {} WHERE {}").format(relation, changes, place))
    else:
        refuse_followers(connection, table.schema, table.table, place)
        connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(relation, place))
        for each in before:
            names = [name for name in kinds if name in each["columns"]]
            connection.execute(
                sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({})").format(
                    relation,
                    sql.SQL(", ").join(map(sql.Identifier, names)),
                    sql.SQL(", ").join(_values(kinds, names, each["columns"])),
                )
            )
    if sorted(digest for _, digest in _rows(connection, table, place)) != sorted(each["digest"] for each in before):
        raise ReconcileError(f"{table.name} {who}: the row does not read as it did before; all is rolled back")
    return 1


def _values(
    kinds: Mapping[str, str], names: Sequence[str], texts: Mapping[str, str | None]
) -> Iterator[sql.Composable]:
    for name in names:
        yield sql.SQL("{}::text::{}").format(texts[name], sql.SQL(kinds[name]))
