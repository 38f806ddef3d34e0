"""Carries requests and answers, and loses, doubles or delays them past later ones as the weather has it."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from proof.sim.loop import VirtualLoop

if TYPE_CHECKING:
    import asyncio

Reply = Callable[[Any], None]
Serve = Callable[[Reply], None]

LATE_MAX_S = 12.0


class NoAnswerError(Exception):
    """The request may have been carried out, may still be, or may never be."""


@dataclass(slots=True, kw_only=True)
class Weather:
    """How likely each mishap is, per message."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    # Arrives long after its sender has given it up, and after what was sent later.
    late: float = 0.0
    doubled: float = 0.0

    def clear(self) -> None:
        self.request_lost = self.reply_lost = self.late = self.doubled = 0.0


class Network:
    def __init__(self, loop: VirtualLoop, rng: Random, weather: Weather) -> None:
        self._loop = loop
        self._rng = rng
        self._weather = weather

    def delay_s(self) -> float:
        return 0.0002 + 0.0015 * self._rng.random()

    async def ask(self, serve: Serve, *, timeout_s: float, delay_s: float = 0.0, risk: float = 1.0) -> Any:
        """Has `serve` called where the request arrives; returns what it replies, or raises NoAnswerError.

        `risk`: how much more likely than others the request is late or doubled, where any are.
        """
        weather, rng, after = self._weather, self._rng, self._loop.after
        exchange = Exchange(self._loop.create_future(), self._loop.time() + timeout_s)
        arrival_s = delay_s + self.delay_s()
        if weather.late and rng.random() < weather.late * risk:
            arrival_s += self._lateness_s()
        is_lost = weather.request_lost > 0 and rng.random() < weather.request_lost
        if not is_lost:
            after(arrival_s, self._arrive, serve, exchange)
        if weather.doubled and rng.random() < weather.doubled * risk:
            after(arrival_s + self._lateness_s(), self._arrive, serve, exchange)
        if is_lost or arrival_s > timeout_s:
            self._watch(exchange)
        try:
            return await exchange.future
        finally:
            if exchange.timer is not None:
                exchange.timer.cancel()

    def stray(self, serve: Serve) -> None:
        """Arrives some time, once more, and nobody hears the answer."""
        self._loop.after(self._lateness_s(), serve, lambda _answer: None)

    def _arrive(self, serve: Serve, exchange: "Exchange") -> None:
        def reply(answer: Any) -> None:
            if not self._weather.reply_lost or self._rng.random() >= self._weather.reply_lost:
                exchange.replied = True
                self._loop.after(self.delay_s(), _resolve, exchange.future, answer)

        serve(reply)
        if not exchange.replied:
            self._watch(exchange)

    def _watch(self, exchange: "Exchange") -> None:
        """Only where no answer is on its way: most requests need no timer."""
        if exchange.timer is None:
            left_s = max(exchange.deadline_s - self._loop.time(), 0.0)
            exchange.timer = self._loop.after(left_s, _give_up, exchange.future)

    def _lateness_s(self) -> float:
        """Of all magnitudes: past the next message, the next transaction, or the next leader."""
        lateness_s: float = LATE_MAX_S * self._rng.random() ** 4
        return lateness_s

    def refuse(self, reply: Reply) -> None:
        """Nobody listens there: known at once."""
        reply(NoAnswerError("connection refused"))


class Exchange:
    """A request and its answer, from the asker's side."""

    __slots__ = ("deadline_s", "future", "replied", "timer")

    def __init__(self, future: "asyncio.Future[Any]", deadline_s: float) -> None:
        self.future = future
        self.deadline_s = deadline_s
        self.replied = False
        self.timer: asyncio.TimerHandle | None = None


def _give_up(future: "asyncio.Future[Any]") -> None:
    if not future.done():
        future.set_exception(NoAnswerError("deadline passed"))


def _resolve(future: "asyncio.Future[Any]", answer: Any) -> None:
    if not future.done():
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
