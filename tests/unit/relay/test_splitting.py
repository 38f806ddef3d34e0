"""Of a batch that the database refuses, only those are judged that it refuses whatever else of the batch is there."""

from __future__ import annotations

import json
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.errors import CheckViolation, ForeignKeyViolation, UniqueViolation

from oncebox.reader import Record
from relay.mapping import RowMapper
from relay.plan import Plan, Planner, Stage, StopError, Unit, make_plan
from relay.splitting import JUDGEMENTS_MAX, MissingReferenceError, Split
from relay.types import Column, TableName, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import psycopg


def target(name: str, *columns: str) -> Target:
    return Target(
        topic=name,
        table=TableName(schema="public", name=name),
        format="json",
        insert_mode="upsert",
        columns=tuple(Column(name=column, type="text", path=(column,)) for column in columns),
        key=("id",),
    )


MAPPERS = {
    "parents": [(0, RowMapper(target("parents", "id")))],
    "children": [(1, RowMapper(target("children", "id", "parent")))],
}
SOURCES = {("parents", 0): 1, ("children", 0): 2}


class Batch:
    """Units, and a database that knows foreign keys and forbids some names."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.parents: set[str] = set()
        self.children: dict[str, str] = {}
        # Children by offset: a row that is written says of which record it is.
        self._parent_of: dict[int, str] = {}
        self.attempts = 0
        # Rows, however often.
        self.planned = 0

    def parent(self, *names: str) -> Batch:
        return self.add(*(("parents", name, "") for name in names))

    def child(self, name: str, parent: str) -> Batch:
        return self.add(("children", name, parent))

    def add(self, *rows: tuple[str, str, str]) -> Batch:
        """One transaction."""
        records = []
        for at, (topic, name, parent) in enumerate(rows):
            offset = 100 * len(self.units) + at
            value = {"id": name, "parent": parent} if topic == "children" else {"id": name}
            records.append(Record(topic, 0, offset, 1, name.encode(), json.dumps(value).encode(), []))
            self._parent_of[offset] = parent
        self.units.append(Unit(records, f"id-{len(self.units)}", 1))
        return self

    def write(self, plans: Iterable[Plan]) -> psycopg.Error | None:
        self.attempts += 1
        parents, children = self.parents.copy(), self.children.copy()
        for plan in plans:
            self.planned += plan.row_count
            for each in plan.rounds:
                parents |= {str(key[0]) for key in each.get(0, Stage()).last}
                for key, (_, offset, _, _) in each.get(1, Stage()).last.items():
                    children[str(key[0])] = self._parent_of[offset]
                if "forbidden" in children:
                    return CheckViolation("forbidden")
                if not parents.issuperset(children.values()):
                    return ForeignKeyViolation("refers to nothing")
                if sum(name.startswith("unique") for name in children.values()) > len(
                    {name for name in children.values() if name.startswith("unique")}
                ):
                    return UniqueViolation("twice")
        self.parents, self.children = parents, children
        return None

    def run(self, on_error: str, *, waits_from: int | None = None) -> Plan:
        planner = Planner(mappers=MAPPERS, sources=SOURCES, high_offsets={}, on_error=on_error)
        refused = self.write([make_plan(planner, self.units, frozenset())])
        assert refused is not None
        split = Split(planner, self.units, frozenset(), self.write, waits_from=waits_from)
        return split.run(refused)


def judged(plan: Plan) -> list[tuple[str, str]]:
    return [((letter.record.key or b"").decode(), letter.state) for letter in plan.letters]


BAD = {"forbidden": ("forbidden", "p"), "orphan": ("orphan", "nobody")}


@pytest.mark.parametrize("order", [*permutations(("child", "parent", "bad"))])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("on_error", ["skip", "park"])
def test_a_child_is_not_blamed_for_another_unit(on_error: str, bad: str, order: Sequence[str]):
    batch = Batch()
    for each in order:
        if each == "parent":
            batch.parent("p")
        else:
            batch.child(*(("c", "p") if each == "child" else BAD[bad]))
    done = batch.run(on_error)
    assert judged(done) == [(bad, "skipped" if on_error == "skip" else "parked")]
    assert batch.children == {"c": "p"}
    assert batch.parents == {"p"}
    assert done.row_count == 2


def test_the_one_that_it_stops_at_is_to_blame():
    with pytest.raises(StopError, match="children partition 0 offset 200: refers to nothing"):
        Batch().child("c", "p").parent("p").child(*BAD["orphan"]).run("stop")


def test_nothing_is_judged_for_lack_of_a_row_that_may_yet_come():
    batch = Batch().child("c", "p").parent("p").child(*BAD["orphan"]).child(*BAD["forbidden"])
    with pytest.raises(MissingReferenceError, match="children partition 0 offset 200: refers to nothing"):
        batch.run("park", waits_from=0)


@pytest.mark.parametrize("orphans", [1, JUDGEMENTS_MAX + 1])
def test_what_has_waited_is_judged_and_what_comes_behind_it_is_not(orphans: int):
    def batch() -> Batch:
        made = Batch()
        for _ in range(orphans):
            made.child(*BAD["orphan"])
        return made.child("x", "nobody")

    assert judged(batch().run("skip", waits_from=orphans + 1)) == [("orphan", "skipped")] * orphans + [("x", "skipped")]
    with pytest.raises(MissingReferenceError, match=f"offset {100 * orphans}: "):
        batch().run("skip", waits_from=orphans)


def test_what_stands_behind_one_that_is_set_aside_stays_behind_it():
    batch = Batch().child("c", "p").child("c", "q").parent("q").parent("p").child(*BAD["forbidden"])
    assert judged(batch.run("skip")) == [("forbidden", "skipped")]
    assert batch.children == {"c": "q"}, "the last one's"


@pytest.mark.parametrize(("on_error", "state"), [("skip", "skipped"), ("park", "parked")])
def test_what_stands_behind_a_judged_one_goes_the_way_of_the_policy(on_error: str, state: str):
    """The orphan's row gets a parent later on; and letters come in the order of the units."""
    batch = Batch().child(*BAD["orphan"]).parent("p").child(*BAD["forbidden"]).child("orphan", "p").child("x", "nobody")
    done = batch.run(on_error)
    behind = [] if on_error == "skip" else [("orphan", "held")]
    assert judged(done) == [("orphan", state), ("forbidden", state), *behind, ("x", state)]
    assert [letter.unit for letter in done.letters] == ([0, 2, 4] if on_error == "skip" else [0, 2, 3, 4])
    assert batch.children == ({"orphan": "p"} if on_error == "skip" else {})


@pytest.mark.parametrize("on_error", ["skip", "stop"])
def test_one_that_others_stand_behind_is_judged_first(on_error: str):
    """Behind the orphan stands what the child refers to."""
    batch = Batch().child("c", "p").child(*BAD["orphan"]).child("x", "nobody").parent("q")
    batch.add(("children", "orphan", "q"), ("parents", "p", ""))
    if on_error == "stop":
        with pytest.raises(StopError, match="offset 100: "):
            batch.run(on_error)
        return
    assert judged(batch.run(on_error)) == [("orphan", "skipped"), ("x", "skipped")]
    assert batch.children == {"c": "p", "orphan": "q"}


def test_a_unique_value_that_one_set_aside_gives_up_is_waited_for():
    batch = Batch()
    batch.parents, batch.children = {"unique"}, {"c": "unique"}
    batch.child("c", "p").child("d", "unique").child(*BAD["forbidden"]).parent("p")
    assert judged(batch.run("skip")) == [("forbidden", "skipped")]
    assert batch.children == {"c": "p", "d": "unique"}


@pytest.mark.parametrize("on_error", ["skip", "park"])
def test_many_orphans_cost_no_more_than_a_few_attempts_each(on_error: str):
    count = 300
    batch = Batch()
    for _ in range(2):
        for number in range(count):
            batch.child(f"orphan-{number}", "nobody")
    batch.parent("p").child("c", "p")
    done = batch.run(on_error)
    assert len(done.letters) == 2 * count
    assert batch.children == {"c": "p"}
    assert batch.attempts < 15 * 2 * count


def test_many_records_of_one_orphan_are_planned_a_few_times_each():
    count = 300
    batch = Batch().parent("p")
    for _ in range(count):
        batch.child("orphan", "nobody")
    assert judged(batch.run("skip")) == [("orphan", "skipped")] * count
    assert batch.planned < 60 * count


@pytest.mark.parametrize("on_error", ["skip", "park"])
def test_many_are_judged_at_once(on_error: str, monkeypatch: pytest.MonkeyPatch):
    """Each by itself would take time by the square of their number, in which the database hears nothing."""
    batch, plan_count = Batch(), 0
    for number in range(300):
        batch.child(f"orphan-{number}", "nobody")

    def counted(*given: Any, **named: Any) -> Plan:
        nonlocal plan_count
        plan_count += 1
        return make_plan(*given, **named)

    monkeypatch.setattr("relay.splitting.make_plan", counted)
    assert len(batch.run(on_error).letters) == 300
    assert plan_count <= batch.attempts


def test_record_by_record_a_long_transaction_is_planned_as_it_is_written():
    batch = Batch()
    batch.add(*(("parents", f"p-{number}", "") for number in range(2_500)))
    planner = Planner(mappers=MAPPERS, sources=SOURCES, high_offsets={}, on_error="stop")
    planned: list[int] = []

    def write(plans: Iterable[Plan]) -> None:
        planned.extend(plan.row_count for plan in plans)

    done = Split(planner, batch.units, frozenset(), write, waits_from=None).run(UniqueViolation("order"))
    assert planned == [1000, 1000, 500]
    assert done.row_count == 2_500
