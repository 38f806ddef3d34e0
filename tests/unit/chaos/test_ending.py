"""The end of a run: a transaction that stays open is told, a backlog that is still being worked off is not."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, KafkaError, KafkaException

from proof.chaos import ending
from proof.chaos.history import Event, HeldBack, Recorder, Stuck, read

QUIET_S, STABLE_S = ending.QUIET_S, ending.STABLE_S


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[float, list[str]]]:
    """How long it took, and what was told: of one partition, by its stable offset and its end at any time."""
    clock = SimpleNamespace(now_s=0.0)

    def until(done: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = clock.now_s + timeout_s
        while not done():
            if clock.now_s > deadline_s:
                return False
            clock.now_s += 1
        return True

    def run(stable: Callable[[float], int], end: Callable[[float], int]) -> tuple[float, list[str]]:
        def ends(_admin: object, isolation: IsolationLevel) -> dict[str, int]:
            at = stable if isolation == IsolationLevel.READ_COMMITTED else end
            return {"copies-0": at(clock.now_s), "lists-0": 7}

        monkeypatch.setattr(ending, "_ends", ends)
        parts: Any = SimpleNamespace(servers="")
        with Recorder(tmp_path / "history") as recorder:
            ending.await_stable(parts, recorder)
        events = [line.event for line in read(tmp_path / "history")]
        return clock.now_s, [_told(event) for event in events]

    monkeypatch.setattr(ending, "AdminClient", lambda _config: None)
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(ending, "until", until)
    return run


def _told(event: Event) -> str:
    if isinstance(event, HeldBack):
        return f"{event.partition} {event.offset_stable} {event.offset_next}"
    assert isinstance(event, Stuck)
    return event.what


def test_nothing_is_open(held_back: Callable[..., Any]) -> None:
    assert held_back(lambda _: 9, lambda _: 9) == (0, [])


def test_a_transaction_that_stays_open(held_back: Callable[..., Any]) -> None:
    assert held_back(lambda _: 4, lambda now_s: min(9 + now_s, 20)) == (QUIET_S + 1, ["copies-0 4 20"])


def test_a_backlog_that_is_worked_off(held_back: Callable[..., Any]) -> None:
    """For longer than a transaction may stand, one after the other."""
    busy_s = 2 * QUIET_S
    assert held_back(int, lambda now_s: max(int(now_s), int(busy_s))) == (busy_s, [])


def test_a_backlog_that_never_ends(held_back: Callable[..., Any]) -> None:
    took_s, told = held_back(int, lambda now_s: int(now_s) + 1)
    assert took_s == STABLE_S + 1
    assert len(told) == 1


def silent_until(answers_s: float) -> Callable[[float], int]:
    def end(now_s: float) -> int:
        if now_s < answers_s:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return 9

    return end


def test_brokers_that_do_not_answer_yet_are_asked_again(held_back: Callable[..., Any]) -> None:
    assert held_back(silent_until(30), silent_until(60)) == (60, [])


def test_brokers_that_never_answer(held_back: Callable[..., Any]) -> None:
    _, told = held_back(silent_until(1e9), silent_until(1e9))
    assert told == ["no broker told the ends of all partitions in 600 s"]
