"""An event loop with virtual time, and processes in it that can stop, go on or die between any two steps.

Callbacks run in the order in which they were scheduled, as asyncio promises; when none is left, time jumps to the next
timer. Nothing else moves time, and nothing outside this process is waited for.
"""

# ruff: noqa: SLF001 - a loop and its handles are made for each other

import asyncio
import heapq
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

_process: ContextVar["Process | None"] = ContextVar("process", default=None)


class ProcessState(Enum):
    RUNNING = 1
    # As by SIGSTOP: what was sent goes on, what arrives waits.
    STOPPED = 2
    DEAD = 3


class Process:
    """What fails as a whole. Belongs to it: every callback whose context stems from it."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.state = ProcessState.RUNNING
        self.steps = 0
        # Dies when it has made so many steps; `died` is told, whatever the reason.
        self.dies_at_step = 0
        self.died: Callable[[], None] | None = None
        # Of a stopped one, to be run when it goes on; of a dead one, to be run never (but see `finish`).
        self.held: list[asyncio.Handle] = []
        self._loop = loop
        loop.processes.append(self)
        self.context = loop.world.copy()
        self.context.run(_process.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        return self._loop.create_task(coroutine, context=self.context.copy())

    def stop(self) -> None:
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.STOPPED

    def resume(self) -> None:
        if self.state is ProcessState.STOPPED:
            self.state = ProcessState.RUNNING
            self._loop.queue(self.held)
            self.held = []

    def die(self) -> None:
        """Not one more step, no clean-up: only what it has already sent is left of it."""
        if self.state is not ProcessState.DEAD:
            self.state = ProcessState.DEAD
            if self.died is not None:
                self._loop.call_soon(self.died, context=self._loop.world)

    def run(self, handle: asyncio.Handle) -> None:
        if self.state is ProcessState.RUNNING:
            self.steps += 1
            handle._run()
            if self.steps == self.dies_at_step:
                self.die()
        else:
            self.held.append(handle)


class StuckError(Exception):
    """Nothing is scheduled any more, and whoever runs the loop still waits."""


class VirtualLoop(base_events.BaseEventLoop):
    # asyncio's own: what runs next, and the heap of timers.
    _ready: deque[Any]
    _scheduled: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        # What happens outside every process: messages under way, brokers, the course of the run itself.
        self.world = Context()
        # Tasks of dead processes must not be collected while it runs: that would run their clean-up.
        self.tasks: list[asyncio.Task[Any]] = []
        self._processes_of_tasks: list[Process | None] = []
        self.processes: list[Process] = []
        self._finishing = False

    def time(self) -> float:
        return self._now_s

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(
            coro, loop=self, name=None if name is None else str(name), context=context
        )
        self.tasks.append(task)
        self._processes_of_tasks.append(_process.get() if context is None else context.get(_process))
        return task

    def after(self, delay_s: float, do: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Something that happens in the world, whoever asked for it."""
        return self.call_at(self._now_s + delay_s, do, *args, context=self.world)

    def queue(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        if not ready:
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
            if not scheduled:
                raise StuckError
            self._now_s = max(self._now_s, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                process = handle._context.get(_process)
                if process is None or self._finishing:
                    handle._run()
                else:
                    process.run(handle)

    def unheard_errors(self) -> list[BaseException]:
        """With which tasks have ended so far, and nobody has asked (of the dead, nobody could)."""
        unheard = (
            task.exception()
            for task, process in zip(self.tasks, self._processes_of_tasks, strict=True)
            if getattr(task, "_log_traceback", False) and not (process and process.state is ProcessState.DEAD)
        )
        return [error for error in unheard if error is not None]

    def finish(self) -> None:
        """Ends all tasks, also those of the dead, and closes the loop."""
        self._finishing = True
        self.set_exception_handler(lambda _loop, _context: None)
        for process in self.processes:
            self.queue(process.held)
        self.run_until_complete(self._end_tasks())
        self.close()

    async def _end_tasks(self) -> None:
        was_quiet = False
        for _ in range(100):
            left = [task for task in self.tasks if not task.done() and task is not asyncio.current_task()]
            for task in left:
                task.cancel()
            # Whoever is told that a task has ended may start another.
            if not left and was_quiet:
                return
            was_quiet = not left
            for _ in range(3):
                await asyncio.sleep(0)
        raise StuckError

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in a system call."""
