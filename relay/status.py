"""What a running relay says of itself: one place that its threads write and the API and metrics read."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from relay.plan import where_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.plan import Letter

log = logging.getLogger(__name__)

State = Literal["STARTING", "RUNNING", "PAUSED", "STANDBY", "WAITING", "STOPPED"]
RATE_WINDOW_S = 10.0


@dataclass(slots=True)
class Status:
    name: str
    instance: str
    state: State = "STARTING"
    message: str = ""
    since_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    fence: int = 0
    rows: int = 0
    batches: int = 0
    retries: int = 0
    letters: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def turn(self, state: State, message: str = "") -> None:
        if state != self.state:
            self.since_ms = int(time.time() * 1000)
        self.state, self.message = state, message

    def applied(self, rows: int) -> None:
        self.rows += rows
        self.batches += 1
        now = time.monotonic()
        self._recent.append((now, rows))
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()

    def set_aside(self, letters: Sequence[Letter]) -> None:
        """Logs the first of a batch; the table has them all."""
        self.letters += len(letters)
        first = letters[0]
        others = f", and {len(letters) - 1} more" if len(letters) > 1 else ""
        named = {"transactional_id": first.transactional_id, "number": first.number}
        log.warning("%s %s: %s%s", first.state, where_of(first.record), first.error, others, extra=named)

    def rows_per_second(self) -> float:
        now = time.monotonic()
        recent = [(at, rows) for at, rows in list(self._recent) if at >= now - RATE_WINDOW_S]
        return sum(rows for _, rows in recent) / RATE_WINDOW_S
