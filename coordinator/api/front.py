"""The way of every call of a client, unary or on a stream: convert, ask the coordinator, fill the response.

Whoever may not make a call never gets here: coordinator.api.auth stops it first.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from coordinator.api.replies import Method
from coordinator.api.rules import (
    NAME_MAX_BYTES,
    RequestRefusedError,
    Rules,
    TopicDeniedError,
    TopicsUnavailableError,
    UnknownTopicsError,
)
from coordinator.calls import Answer, Calls
from coordinator.core.commands import Command, ErrorCode, GetOutcome, OutcomeForgotten, OutcomeKnown, Refused
from coordinator.core.records import Outcome

# An answer that says "too late" must itself be in time.
RETURN_MARGIN_MAX_MS = 200
RETURN_MARGIN_SHARE = 0.1

FindInFeed = Callable[[str, int], Awaitable[Outcome | None]]


class Front:
    def __init__(
        self,
        *,
        calls: Calls,
        rules: Rules,
        find_in_feed: FindInFeed,
        call_timeout_ms: int,
        call_timeout_max_ms: int,
    ) -> None:
        self.calls = calls
        self._rules = rules
        self._find_in_feed = find_in_feed
        self._call_timeout_ms = call_timeout_ms
        self._call_timeout_max_ms = call_timeout_max_ms

    def timeout_ms(self, asked_ms: int | None) -> int:
        """What a caller that asks for so much (None: says nothing) gets."""
        return self._call_timeout_ms if asked_ms is None else min(asked_ms, self._call_timeout_max_ms)

    def convert(self, method: Method, request: Any, address: str) -> Command | Refused | None:
        """None: topics have to be looked up first, which only `handle` does."""
        try:
            return method.to_command(request, self._rules, address)
        except RequestRefusedError as error:
            return error.refused
        except UnknownTopicsError:
            return None

    async def handle(
        self, method: Method, request: Any, response: Any, address: str, timeout_ms: int
    ) -> Refused | None:
        """Fills the response; None: done."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_ms / 1_000
        try:
            command = method.to_command(request, self._rules, address)
        except RequestRefusedError as error:
            return error.refused
        except UnknownTopicsError as error:
            converted = await self._convert_in_time(method, request, address, error.topics, until)
            if isinstance(converted, Refused):
                return converted
            command = converted
            # The shard's share is what the look at the topics has left of it.
            timeout_ms = max(int((until - loop.time()) * 1_000), 1)
        answer = await self.calls.call(command, timeout_ms)
        if isinstance(command, GetOutcome):
            answer = await self._ask_feed(command, answer, until)
        if isinstance(answer, Refused):
            return answer
        method.fill(response, command, answer)
        return None

    async def _convert_in_time(
        self, method: Method, request: Any, address: str, topics: frozenset[str], until: float
    ) -> Command | Refused:
        try:
            async with asyncio.timeout_at(until):
                return await self._convert_again(method, request, address, topics)
        except TimeoutError:
            return Refused(
                code=ErrorCode.REQUEST_TIMED_OUT,
                message="no broker said in time which topics there are; nothing was done, send the call again",
                retriable=True,
            )

    async def _convert_again(
        self, method: Method, request: Any, address: str, topics: frozenset[str]
    ) -> Command | Refused:
        """Each time round, topics are asked for that were not asked for before."""
        asked: frozenset[str] = frozenset()
        try:
            while True:
                await self._rules.topics.refresh(topics)
                asked |= topics
                try:
                    return method.to_command(request, replace(self._rules, asked=asked), address)
                except UnknownTopicsError as error:
                    topics = error.topics
        except RequestRefusedError as error:
            return error.refused
        except TopicDeniedError as error:
            return Refused(
                code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
                message=f"Kafka does not let the coordinator see {error.topic}: its principal needs Describe there",
            )
        except TopicsUnavailableError:
            return Refused(
                code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
                message="no broker said which topics there are; send the call again",
                retriable=True,
            )

    async def _ask_feed(self, command: GetOutcome, answer: Answer | Refused, until: float) -> Answer | Refused:
        """The feed knows commits that the id's record has forgotten, also of ids that have expired."""
        if isinstance(answer, Refused):
            if answer.code is not ErrorCode.INVALID_PRODUCER_ID_MAPPING:
                return answer
        elif not isinstance(answer.reply, OutcomeForgotten):
            return answer
        try:
            async with asyncio.timeout_at(until):
                outcome = await self._find_in_feed(command.transactional_id, command.number)
        except TimeoutError:
            return Refused(
                code=ErrorCode.REQUEST_TIMED_OUT,
                message=f"the feed was not searched in time for transaction {command.number}",
                retriable=True,
            )
        if outcome is not None:
            return Answer(reply=OutcomeKnown(outcome=outcome))
        if isinstance(answer, Refused):
            return answer
        return Refused(
            code=ErrorCode.OUTCOME_EXPIRED,
            message=f"transaction {command.number} was decided so long ago that neither log nor feed tell its outcome",
        )


def named_by(request: Any) -> tuple[str, int]:
    """The transaction that a request speaks of, for its refusal; an id that is too long to be one is not told back."""
    transactional_id: str = request.transactional_id
    grant = getattr(request, "grant", None)
    number = grant.number if grant is not None else getattr(request, "number", 0)
    return transactional_id if len(transactional_id) <= NAME_MAX_BYTES else "", number


def asked_ms(context: Any) -> int | None:
    """Up to when the client waits, less the way back; None: it does not say."""
    remaining_s: float | None = context.time_remaining()
    if remaining_s is None:
        return None
    remaining_ms = remaining_s * 1_000
    return max(1, int(remaining_ms - min(RETURN_MARGIN_MAX_MS, remaining_ms * RETURN_MARGIN_SHARE)))


def address_of(context: Any) -> str:
    """Where the call came from: ipv6:%5B::1%5D:1234 is [::1]:1234."""
    peer: str = unquote(context.peer())
    kind, _, address = peer.partition(":")
    return address if kind in {"ipv4", "ipv6"} else peer
