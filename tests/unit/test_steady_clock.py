"""The coordinator's clock goes with the machine's, and not with its jumps."""

import time

import pytest

from coordinator.steady_clock import SLOWLY, SteadyClock

SECOND_NS = 1_000_000_000
HOUR_S = 3_600


class Machine:
    def __init__(self) -> None:
        self.elapsed_ns = 5 * SECOND_NS
        self.wall_ns = 1_000_000 * SECOND_NS
        self.clock = SteadyClock(lambda: self.wall_ns, lambda: self.elapsed_ns)

    def pass_time(self, seconds: float, *, wall_seconds: float | None = None) -> int:
        self.elapsed_ns += int(seconds * SECOND_NS)
        self.wall_ns += int((seconds if wall_seconds is None else wall_seconds) * SECOND_NS)
        return self.clock.now_ms()

    @property
    def wall_ms(self) -> int:
        return self.wall_ns // 1_000_000


def test_it_is_the_wall_clock_while_that_goes_on_as_it_should() -> None:
    machine = Machine()
    assert machine.clock.now_ms() == machine.wall_ms
    for _ in range(100):
        assert machine.pass_time(0.7) == machine.wall_ms
    # As time synchronisation corrects it: five in ten thousand.
    for _ in range(100):
        assert machine.pass_time(1, wall_seconds=1.0005) == machine.wall_ms


@pytest.mark.parametrize("jump_s", [-6 * HOUR_S, -300, 300, 6 * HOUR_S])
def test_a_jump_and_back_again_changes_nothing_that_is_timed(jump_s: int) -> None:
    machine = Machine()
    before_ms = machine.clock.now_ms()
    machine.wall_ns += jump_s * SECOND_NS
    away = [machine.pass_time(0.25) for _ in range(40)]
    machine.wall_ns -= jump_s * SECOND_NS
    back = [machine.pass_time(0.25) for _ in range(40)]
    assert sorted(away + back) == away + back
    assert away[-1] - before_ms == pytest.approx(10_000, rel=1 / SLOWLY)
    assert back[-1] - away[-1] == pytest.approx(10_000, rel=1 / SLOWLY)
    assert machine.clock.now_ms() == pytest.approx(machine.wall_ms, abs=1)


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_a_jump_for_good_is_made_good_slowly(jump_s: int) -> None:
    machine = Machine()
    machine.wall_ns += jump_s * SECOND_NS
    last_ms = machine.clock.now_ms()
    for _ in range(SLOWLY):
        now_ms = machine.pass_time(HOUR_S)
        assert now_ms - last_ms == pytest.approx(HOUR_S * 1_000, rel=1 / SLOWLY + 0.001)
        last_ms = now_ms
    assert last_ms == machine.wall_ms


def test_without_arguments_it_is_the_machines() -> None:
    assert SteadyClock().now_ms() == pytest.approx(time.time() * 1_000, abs=60_000)
