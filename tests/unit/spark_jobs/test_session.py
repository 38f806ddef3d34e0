"""Jars that were resolved once are not resolved again, unless one of them is gone; and how a session's use ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

from spark_jobs.errors import CannotCheckError
from spark_jobs.session import Resolved, used_session

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "oncebox").mkdir()
    made = [tmp_path / "a b.jar", tmp_path / "c.jar"]
    for each in made:
        each.write_bytes(b"")
    return made


def test_resolved_once(jars: list[Path]):
    first = Resolved("org:one:1,org:two:2")
    assert first.options() == {"spark.jars.packages": "org:one:1,org:two:2"}
    first.remember(",".join(each.as_uri() for each in jars))
    again = Resolved("org:one:1,org:two:2")
    assert again.options() == {"spark.jars": ",".join(map(str, jars))}
    again.remember(",".join(map(str, jars)))
    assert again.options() == {"spark.jars": ",".join(map(str, jars))}
    jars[1].unlink()
    assert again.options() == {"spark.jars.packages": "org:one:1,org:two:2"}


def test_other_packages_are_other_jars(jars: list[Path]):
    Resolved("org:one:1").remember(jars[0].as_uri())
    assert Resolved("org:one:2").options() == {"spark.jars.packages": "org:one:2"}
    assert Resolved("").options() == {}  # they are on the class path already


def test_they_are_resolved_by_one_at_a_time(jars: list[Path]):
    packages = "org:one:1"
    first, second = Resolved(packages), Resolved(packages)
    found: dict[str, str] = {}

    def start_too() -> None:
        with second.turn():
            found.update(second.options())

    with first.turn():
        other = threading.Thread(target=start_too)
        other.start()
        other.join(0.2)
        assert other.is_alive()
        assert not found
        first.remember(jars[0].as_uri())
    other.join(60)
    assert found == {"spark.jars": str(jars[0])}
    with first.turn(), second.turn():
        pass  # nobody waits where nothing is to be resolved


def test_a_cache_that_cannot_be_written(jars: list[Path], tmp_path: Path):
    (tmp_path / "oncebox").rmdir()
    (tmp_path / "oncebox").touch()
    given = Resolved("org:one:1")
    with given.turn():
        given.remember(jars[0].as_uri())
    assert given.options() == {"spark.jars.packages": "org:one:1"}


class NoSpark:
    """As far as a session of somebody else's is touched."""

    class conf:  # noqa: N801 - Spark's name
        @staticmethod
        def set(name: str, value: str) -> None:
            pass

    class sparkContext:  # noqa: N801 - Spark's name
        master = "local[1]"


SETTINGS: Any = SimpleNamespace(workers_wait_ms=1_000)


def test_who_interrupts_is_not_answered_with_what_failed_on_the_way_out():
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            tidy_up()

    def tidy_up() -> None:
        raise Py4JNetworkError("Answer from Java side is empty")

    given: Any = NoSpark()
    with pytest.raises(KeyboardInterrupt), used_session(SETTINGS, given):
        interrupted()
    with pytest.raises(CannotCheckError, match="Spark failed during the run"), used_session(SETTINGS, given):
        tidy_up()
