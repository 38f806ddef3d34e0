"""The version guard against a model: random histories, rewound at random, in random batches. The model applies each
record when it comes for the first time and never again; the table must agree after every batch.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from relay.plan import Singles, Unit, make_plan
from tests.integration.relay.conftest import Bench, record
from tests.support.relay import GUARD

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncebox.reader import Record

PARTITIONS = 3
KEYS = 4
BATCHES = 14


def history(rng: random.Random) -> list[list[Record]]:
    """Per partition; rows move between partitions freely."""
    found = []
    for partition in range(PARTITIONS):
        records = []
        for offset in range(40):
            key = rng.randrange(KEYS)
            value = json.dumps({"id": key, "state": f"{partition}:{offset}"}).encode()
            is_delete = rng.random() < 0.3
            records.append(record(offset, None if is_delete else value, key=str(key).encode(), partition=partition))
        found.append(records)
    return found


def interleaved(rng: random.Random, parts: list[list[Record]]) -> list[Record]:
    left = [list(part) for part in parts if part]
    merged = []
    while left:
        part = rng.choice(left)
        merged.append(part.pop(0))
        left = [each for each in left if each]
    return merged


def units_of(rng: random.Random, records: list[Record]) -> Any:
    """As partition mode has them, or in transactions."""
    if rng.random() < 0.5:
        return Singles(records)
    units: list[Unit] = []
    while records:
        size = rng.randrange(1, 4)
        units.append(Unit(records[:size], "t", len(units)))
        records = records[size:]
    return units


@pytest.mark.parametrize("seed", range(25))
def test_the_table_agrees_with_the_model(bench: Callable[..., Bench], seed: int) -> None:
    rng = random.Random(seed)
    made = bench(
        f"CREATE TABLE orders (id bigint PRIMARY KEY, state text, {GUARD})",
        [{"topic": "orders", "table": "orders", "key": ["id"]}],
    )
    logs = history(rng)
    positions, high = [0] * PARTITIONS, [0] * PARTITIONS
    model: dict[int, str] = {}
    for _ in range(BATCHES):
        if rng.random() < 0.4:
            partition = rng.randrange(PARTITIONS)
            positions[partition] = rng.randrange(high[partition] + 1)
        parts = []
        for partition, log in enumerate(logs):
            count = rng.randrange(0, 9)
            parts.append(log[positions[partition] : positions[partition] + count])
            positions[partition] += len(parts[-1])
        batch = interleaved(rng, parts)
        if not batch:
            continue
        units = units_of(rng, batch)
        done = made.sink.apply(
            made.planner, units, make_plan(made.planner, units, frozenset()), frozenset(), made._save
        )
        assert not done.letters
        for each in batch:
            if each.offset >= high[each.partition]:
                high[each.partition] = each.offset + 1
                made.high[made.sources["orders", each.partition]] = each.offset + 1
                if each.value is None:
                    model.pop(int(each.key or b""), None)
                else:
                    model[int(each.key or b"")] = json.loads(each.value)["state"]
        assert dict(made.rows("SELECT id, state FROM orders")) == model
