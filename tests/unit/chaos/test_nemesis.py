"""The schedule depends on the seed alone; every kind of fault comes before any comes twice."""

import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import yaml

from proof.chaos.checks import CHECKS
from proof.chaos.history import operation_of
from proof.chaos.nemesis import EVERYTHING, FAULTS, UnknownFaultError, chosen, rounds
from proof.chaos.planted import BUGS
from proof.chaos.workload import BANK, LISTS, TOPICS, records, relay_config, write_of


def test_the_same_seed_gives_the_same_schedule() -> None:
    one, two = (list(islice(rounds(7, list(FAULTS)), 50)) for _ in range(2))
    assert one == two
    assert one != list(islice(rounds(8, list(FAULTS)), 50))


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_before_any_comes_twice(seed: int) -> None:
    steps = [step.fault for each in islice(rounds(seed, list(FAULTS)), 100) for step in each.steps]
    assert set(steps[: len(FAULTS)]) == set(FAULTS)


@pytest.mark.parametrize("seed", range(20))
def test_two_faults_at_a_time_are_of_different_parts(seed: int) -> None:
    for each in islice(rounds(seed, list(FAULTS)), 50):
        nouns = [FAULTS[step.fault].noun for step in each.steps]
        assert len(nouns) == len(set(nouns)) <= 2
        assert EVERYTHING not in nouns or len(nouns) == 1
        for step in each.steps:
            assert FAULTS[step.fault].down_min_s <= step.down_s <= FAULTS[step.fault].down_max_s


def test_faults_are_chosen_by_name_part_or_verb() -> None:
    assert chosen("") == list(FAULTS)
    assert chosen("kill-broker, relay") == ["kill-broker", "kill-relay", "pause-relay", "jump-relay"]
    for verb in ("cut", "mute", "delay"):
        assert {FAULTS[fault].noun for fault in chosen(verb)} == {"coordinator", "broker", "postgres"}
    assert {FAULTS[fault].noun for fault in chosen("jump")} == {"coordinator", "relay", "outbox", "copier", "client"}
    assert chosen("request") == ["late-request", "repeat-request", "lost-reply"]
    with pytest.raises(UnknownFaultError, match=r"no fault 'fire'; there are kill-coordinator: SIGKILL"):
        chosen("kill-broker,fire")


def test_a_transfer_writes_the_same_amount_to_all_three_topics() -> None:
    writes = [write_of(record) for record in records("bank", "x/1", Random(1))]
    assert [write.topic for write in writes] == list(BANK)
    assert len({write.amount for write in writes}) == 1
    assert [write.item for write in writes] == ["x/1#0", "x/1#1", "x/1#2"]


def test_an_append_has_items_of_its_own() -> None:
    random = Random(1)
    writes = [write_of(record) for number in range(50) for record in records("lists", f"x/{number}", random)]
    assert {write.topic for write in writes} == {LISTS}
    assert len({write.item for write in writes}) == len(writes)
    assert {operation_of(write.item) for write in writes} == {f"x/{number}" for number in range(50)}


def test_every_topic_is_copied_into_a_table() -> None:
    tables = yaml.safe_load(relay_config(servers="x:1", dsn="postgresql://x", session_ms=1))["tables"]
    assert [table["topic"] for table in tables] == list(TOPICS)


def test_the_guide_lists_all_faults_anomalies_and_bugs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "chaos.md").read_text()
    for fault, kind in FAULTS.items():
        assert f"| `{fault}` | {kind.what} |" in page
    for name, bug in BUGS.items():
        assert f"| `{name}` | {bug.what} |" in page
        assert bug.caught_by <= set(CHECKS)
    for check in CHECKS:
        assert re.search(rf"^\| .*\b{check}\b.* \|", page, re.MULTILINE), check
