"""Decides prepared transactions beside the database, as `oncebox outbox resolve` does: first there, then in Kafka.

Whether their owners are dead, late or well it cannot know, and it waits for nobody.
"""

import asyncio
from random import Random

from coordinator.core.commands import End
from coordinator.core.records import Grant, Result
from proof.sim.caller import TIMEOUT_MS, Caller
from proof.sim.database import settle
from proof.sim.instance import Instance
from proof.sim.network import NoAnswerError
from proof.sim.world import World

LOOK_EVERY_MAX_S = 2.0


class Resolver:
    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._caller = Caller(world, "resolver", rng)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_MAX_S * self._rng.random())
            for transactional_id, grant in await self._prepared(self._rng.choice(self._world.instances)):
                await self._decide(transactional_id, grant)

    async def _prepared(self, instance: Instance) -> list[tuple[str, Grant]]:
        """What an instance lists is of no binding: it may have been deposed."""
        try:
            listed: list[tuple[str, Grant]] = await self._world.network.ask(
                instance.list_prepared, timeout_s=TIMEOUT_MS / 1000
            )
        except NoAnswerError:
            return []
        return listed

    async def _decide(self, transactional_id: str, grant: Grant) -> None:
        committed = await settle(self._world.database, transactional_id, grant.number)
        result = Result.COMMITTED if committed else Result.ABORTED
        await self._caller.call(End(transactional_id=transactional_id, grant=grant, result=result))
