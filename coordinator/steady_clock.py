"""The wall clock without its jumps: timeouts are counted by it, and who sets the machine's time must not end, nor keep
open, what waits for one. It never goes back. After a jump it comes up to the wall clock slowly, a little faster or
slower than time itself; the small corrections of time synchronisation it follows at once.
"""

import time
from collections.abc import Callable

# One part in so many: an hour is made good in a day, and meanwhile a timeout of a minute is three seconds off.
SLOWLY = 20
NS_PER_MS = 1_000_000


def _elapsed_ns() -> int:
    """Goes on while the machine sleeps, where there is such a clock: brokers forget us meanwhile."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SteadyClock:
    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        elapsed_ns: Callable[[], int] = _elapsed_ns,
    ) -> None:
        self._wall_ns = wall_ns
        self._elapsed_ns = elapsed_ns
        self._looked_at_ns = elapsed_ns()
        self._now_ns = wall_ns()

    def now_ms(self) -> int:
        looked_at_ns = self._elapsed_ns()
        passed_ns = looked_at_ns - self._looked_at_ns
        self._looked_at_ns = looked_at_ns
        behind_ns = self._wall_ns() - (self._now_ns + passed_ns)
        most_ns = passed_ns // SLOWLY
        self._now_ns += passed_ns + max(-most_ns, min(behind_ns, most_ns))
        return self._now_ns // NS_PER_MS
