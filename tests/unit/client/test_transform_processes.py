"""Several processes: how often one is started again, and what is told of one that raises."""

import os
import signal
from typing import Any

import pytest

from oncebox import transform_processes
from oncebox.errors import UsageError
from oncebox.reader.types import Record
from oncebox.transform_processes import ProcessFailedError, transform_in_processes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """Kills the process that it is handed to."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return die, ()


async def nothing(_record: Record, _transaction: Any) -> None: ...


def test_a_process_that_is_killed_again_and_again_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform_processes, "RESTARTS_MAX", 2)
    deadly: Any = Deadly()
    with pytest.raises(ProcessFailedError, match=r"g-here-0 was killed 3 times, last by signal 9"):
        transform_in_processes(1, "t", "g", nothing, kafka=deadly, coordinators="127.0.0.1:1", name="here")


def test_a_process_that_raises_stops_all() -> None:
    with pytest.raises(ProcessFailedError, match=r"g-here-[01] ended with an error"):
        transform_in_processes(2, "t", "g", nothing, kafka="127.0.0.1:1", coordinators="127.0.0.1:1", name="here")


def test_none_is_too_few() -> None:
    with pytest.raises(UsageError, match="at least one"):
        transform_in_processes(0, "t", "g", nothing, kafka="127.0.0.1:1", coordinators="127.0.0.1:1")
