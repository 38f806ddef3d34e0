"""Bugs planted on purpose, outside the product's code: a checker that has never caught anything proves nothing.

`python -m proof.chaos.planted BUG …` is the bug's module with the bug in it.
"""

import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coordinator.markers import writer as marker_writer
from coordinator.markers.plan import Ending
from coordinator.steady_clock import SteadyClock
from oncebox.transaction import Transaction
from relay.outbox import relay as outbox_relay
from relay.sink import Sink

# Between the two halves of what should be one: so long that most of the relay's time lies in between, and so do most
# faults.
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    what: str
    # At least one of these checks must find it.
    caught_by: frozenset[str]
    # Kinds of faults that bring it to light; empty: it shows without any.
    faults: str = ""
    # What has it; empty: whoever looks.
    module: str = ""


BUGS = {
    "dirty-reads": Bug(
        what="the consumer reads what is not committed",
        caught_by=frozenset({"aborted read", "read before commit"}),
    ),
    "rows-before-position": Bug(
        what="the relay commits rows first and its position later, without a fence around both",
        caught_by=frozenset({"duplicate row"}),
        faults="kill-relay",
        module="relay",
    ),
    "position-before-rows": Bug(
        what="the relay commits its position first and the rows later",
        caught_by=frozenset({"record without row"}),
        faults="kill-relay",
        module="relay",
    ),
    "outbox-without-token": Bug(
        what="the outbox relay goes on where the slot stands, whatever it had published",
        caught_by=frozenset({"duplicate", "duplicate row", "order"}),
        faults="kill-outbox",
        module="proof.chaos.outbox",
    ),
    "copy-without-offsets": Bug(
        what="the copier commits its records without its offsets",
        caught_by=frozenset({"copy"}),
        faults="kill-copier",
        module="proof.chaos.copier",
    ),
    "offsets-without-copies": Bug(
        what="the copier commits its offsets without its records",
        caught_by=frozenset({"copy"}),
        module="proof.chaos.copier",
    ),
    "always-commit": Bug(
        what="the coordinator writes the markers of aborts as those of commits",
        caught_by=frozenset({"marker unlike its decision"}),
        module="coordinator",
    ),
    "timeouts-by-wall-clock": Bug(
        what="the coordinator counts timeouts by a clock that jumps",
        caught_by=frozenset({"hanging transaction"}),
        faults="jump-coordinator",
        module="coordinator",
    ),
}

_apply: Callable[..., Any] = Sink.apply


def _rows_before_position(
    self: Sink, planner: Any, units: Any, plan: Any, holds: Any, save: Callable[[Any, Any], None]
) -> Any:
    done = _apply(self, planner, units, plan, holds, lambda _connection, _done: None)
    time.sleep(PAUSE_S)
    with self._connection.transaction():
        save(self._connection, done)
    return done


def _position_before_rows(
    self: Sink, planner: Any, units: Any, plan: Any, holds: Any, save: Callable[[Any, Any], None]
) -> Any:
    with self._connection.transaction():
        save(self._connection, plan)
    time.sleep(PAUSE_S)
    return _apply(self, planner, units, plan, holds, lambda _connection, _done: None)


def _outbox_without_token(token: Any, facts: Any) -> Any:
    return replace(_going_on(token, facts), position=0)


_going_on = outbox_relay._going_on  # noqa: SLF001 - a bug knows no borders


async def _forgotten(self: Transaction, *_: Any, **__: Any) -> None:
    """Nothing is sent."""


def _always_commit(**fields: Any) -> Ending:
    return Ending(**(fields | {"commit": True}))


def _wall_clock_ms(self: SteadyClock) -> int:
    return self._wall_ns() // 1_000_000


def plant(bug: str) -> None:
    match bug:
        case "rows-before-position":
            Sink.apply = _rows_before_position  # type: ignore[method-assign]
        case "position-before-rows":
            Sink.apply = _position_before_rows  # type: ignore[method-assign]
        case "outbox-without-token":
            outbox_relay._going_on = _outbox_without_token  # noqa: SLF001
        case "copy-without-offsets":
            Transaction.send_offsets = _forgotten  # type: ignore[method-assign]
        case "offsets-without-copies":
            Transaction.send = _forgotten  # type: ignore[method-assign, assignment]
        case "always-commit":
            marker_writer.Ending = _always_commit  # type: ignore[attr-defined, assignment]
        case "timeouts-by-wall-clock":
            SteadyClock.now_ms = _wall_clock_ms  # type: ignore[method-assign]


def main() -> None:
    bug = sys.argv.pop(1)
    plant(bug)
    runpy.run_module(BUGS[bug].module, run_name="__main__")


if __name__ == "__main__":
    main()
