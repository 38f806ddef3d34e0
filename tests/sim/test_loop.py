"""The virtual loop: time jumps, order is kept, processes stop, go on and die between two steps."""

import asyncio
from collections.abc import Iterator

import pytest

from proof.sim.loop import Process, ProcessState, StuckError, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    if not made.is_closed():
        made.finish()


async def count(steps: list[float], every_s: float = 1.0) -> None:
    while True:
        await asyncio.sleep(every_s)
        steps.append(asyncio.get_running_loop().time())


def test_time_jumps_to_the_next_timer(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(3_600))
    assert loop.time() == 3_600


def test_what_is_due_at_once_runs_in_its_order(loop: VirtualLoop) -> None:
    ran: list[int] = []
    for number in range(5):
        loop.call_soon(ran.append, number)
    loop.run_until_complete(asyncio.sleep(0))
    assert ran == [0, 1, 2, 3, 4]


def test_waiting_for_nothing_is_an_error(loop: VirtualLoop) -> None:
    with pytest.raises(StuckError):
        loop.run_until_complete(loop.create_future())


def test_a_stopped_process_makes_no_step_until_it_goes_on(loop: VirtualLoop) -> None:
    process, steps = Process(loop, "p"), list[float]()
    process.spawn(count(steps))
    loop.after(2.5, process.stop)
    loop.after(7.5, process.resume)
    loop.run_until_complete(asyncio.sleep(9))
    assert steps == [1.0, 2.0, 7.5, 8.5]


def test_a_dead_process_makes_no_step_and_cleans_nothing_up(loop: VirtualLoop) -> None:
    process, told = Process(loop, "p"), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            told.append("cleaned up")

    process.spawn(work())
    process.died = lambda: told.append("died")
    loop.after(1, process.die)
    loop.run_until_complete(asyncio.sleep(60))
    assert told == ["died"]


def test_tasks_and_timers_of_a_process_belong_to_it(loop: VirtualLoop) -> None:
    process, steps = Process(loop, "p"), list[float]()

    async def parent() -> None:
        asyncio.create_task(count(steps))  # noqa: RUF006 - the loop keeps it
        asyncio.get_running_loop().call_later(0.5, steps.append, 0.5)

    process.spawn(parent())
    loop.after(1.5, process.die)
    loop.run_until_complete(asyncio.sleep(5))
    assert steps == [0.5, 1.0]


def test_a_process_dies_after_a_given_step(loop: VirtualLoop) -> None:
    process, steps = Process(loop, "p"), list[float]()
    process.dies_at_step = 4
    process.spawn(count(steps))
    loop.run_until_complete(asyncio.sleep(60))
    assert process.state is ProcessState.DEAD
    assert process.steps == 4
    assert len(steps) < 4


def test_errors_that_nobody_has_heard_of_are_told(loop: VirtualLoop) -> None:
    async def fail(text: str) -> None:
        raise ValueError(text)

    loop.create_task(fail("unheard"))
    with pytest.raises(ValueError, match="heard"):
        loop.run_until_complete(fail("heard"))
    assert [str(error) for error in loop.unheard_errors()] == ["unheard"]


def test_what_is_left_is_ended_in_the_end(loop: VirtualLoop) -> None:
    dead, stopped = Process(loop, "dead"), Process(loop, "stopped")
    tasks = [process.spawn(count([])) for process in (dead, stopped)]
    loop.after(1.0, dead.die)
    loop.after(1.0, stopped.stop)
    loop.run_until_complete(asyncio.sleep(2))
    loop.finish()
    assert all(task.cancelled() for task in tasks)
