"""How a client gets an answer: it asks around for the leader, and asks again where none comes."""

import asyncio
from random import Random

from coordinator.calls import Answer
from coordinator.core.commands import Command, End, ErrorCode, GetOutcome, Heartbeat, Refused
from proof.sim.network import NoAnswerError
from proof.sim.world import World

TIMEOUT_MS = 2_000
PAUSE_FIRST_S = 0.02
PAUSE_MAX_S = 0.4


class Caller:
    def __init__(self, world: World, client: str, rng: Random) -> None:
        self._world = world
        self._client = client
        self._rng = rng
        self._target = rng.randrange(len(world.instances))

    async def call(self, command: Command) -> Answer | Refused:
        """Until somebody has an answer to give."""
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                answer = await self._ask(self._target, command)
            except NoAnswerError:
                if isinstance(command, End) and self._rng.random() < 0.3:
                    await self._ask_what_became_of(command)
            else:
                if not (isinstance(answer, Refused) and answer.retriable):
                    return answer
                if answer.code not in {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE}:
                    await asyncio.sleep(pause_s)
                    continue
            self._target = (self._target + 1) % len(self._world.instances)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def notify(self, heartbeat: Heartbeat) -> None:
        """Once: it may be lost."""
        try:
            await self._ask(self._target, heartbeat)
        except NoAnswerError:
            return

    async def _ask(self, target: int, command: Command) -> Answer | Refused:
        return await self._world.call(self._world.instances[target], self._client, command, timeout_ms=TIMEOUT_MS)

    async def _ask_what_became_of(self, end: End) -> None:
        """Only for the record: whatever it says, the end is sent again, for the next grant comes with its answer."""
        command = GetOutcome(transactional_id=end.transactional_id, number=end.grant.number)
        try:
            await self._ask(self._rng.randrange(len(self._world.instances)), command)
        except NoAnswerError:
            return
