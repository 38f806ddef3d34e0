"""The parts of one run and how they reach each other."""

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from coordinator.calls import Answer
from coordinator.core.commands import Command, Refused
from oncebox.wire import TopicPartition
from proof.sim.cluster import Cluster
from proof.sim.database import Database
from proof.sim.loop import VirtualLoop
from proof.sim.network import Network, Weather
from proof.sim.plan import Plan
from proof.sim.recorder import Recorder

if TYPE_CHECKING:
    from proof.sim.instance import Instance

OFFSETS_TOPIC = "__consumer_offsets"


@dataclass(slots=True)
class World:
    loop: VirtualLoop
    plan: Plan
    rng: Random
    weather: Weather
    network: Network
    cluster: Cluster
    recorder: Recorder
    # The other half of PREPARED transactions.
    database: Database
    instances: "list[Instance]" = field(default_factory=list)

    async def call(self, instance: "Instance", client: str, command: Command, *, timeout_ms: int) -> Answer | Refused:
        """One call to one instance; raises NoAnswerError."""
        call = self.recorder.called(client, command)
        answer: Answer | Refused = await self.network.ask(
            lambda reply: instance.serve(command, timeout_ms, reply), timeout_s=timeout_ms / 1000 + 0.5
        )
        self.recorder.answered(call, answer)
        return answer

    def data_partitions(self) -> list[TopicPartition]:
        """Whether they exist just now or not."""
        return [TopicPartition(topic, index) for topic, count in self.plan.topics for index in range(count)]
