"""Who is a member: asked of the group's coordinator alone, and of whoever coordinates it by now."""

import asyncio
from typing import Any

import pytest

from coordinator.group import Group, MembersUnknownError, client_id
from oncebox.wire import Coordinator, DescribedGroup, ErrorCode, KafkaSettings, OutcomeUnknownError

GROUP = "leaders"
MEMBERS = ("a:1", "b:1")


class Brokers:
    """Stands in for Wire: some brokers answer, and the one asked before anything else is whom nobody doubts."""

    def __init__(self, *node_ids: int, silent: set[int], coordinator_id: int) -> None:
        self.silent = silent
        self.coordinator_id = coordinator_id
        # As each broker says; those that are cut off say what was so before.
        self.said_by: dict[int, int] = {}
        self._known = list(node_ids)
        self.asked: list[int] = []

    def _ask(self, node_id: int) -> None:
        self.asked.append(node_id)
        if node_id in self.silent:
            raise OutcomeUnknownError(f"broker {node_id} does not answer")

    async def find_group_coordinator(self, _group_id: str, **_: Any) -> Coordinator:
        first = self._known[0]
        self._ask(first)
        node_id = self.said_by.get(first, self.coordinator_id)
        return Coordinator(error=ErrorCode.NONE, error_message=None, node_id=node_id)

    async def describe_group(self, node_id: int, _group_id: str, **_: Any) -> DescribedGroup:
        self._ask(node_id)
        if node_id != self.coordinator_id:
            return DescribedGroup(error=ErrorCode.NOT_COORDINATOR, client_ids=())
        ours = [client_id(address.partition(":")[0], address) for address in MEMBERS]
        return DescribedGroup(error=ErrorCode.NONE, client_ids=(*ours, "somebody-else"))

    def doubt(self, node_id: int | None = None) -> None:
        doubted = self._known[0] if node_id is None else node_id
        self._known.sort(key=lambda known: known == doubted)

    async def metadata(self, _topics: Any, **_: Any) -> None:
        pass


def group_on(brokers: Any) -> Group:
    async def revoked(_partitions: set[int]) -> None:
        pass

    return Group(
        KafkaSettings(bootstrap_servers="nowhere:1"),
        brokers,
        group_id=GROUP,
        topic="log",
        instance="a",
        address="a:1",
        assigned=lambda _partitions: None,
        revoked=revoked,
    )


async def test_a_broker_that_is_silent_hides_no_member() -> None:
    brokers = Brokers(1, 2, 3, silent={3}, coordinator_id=2)
    assert await group_on(brokers).members() == {"a": "a:1", "b": "b:1"}
    assert 3 not in brokers.asked


@pytest.mark.parametrize(
    "brokers",
    [
        pytest.param(lambda: Brokers(1, 2, silent={1}, coordinator_id=2), id="the one asked first is silent"),
        pytest.param(lambda: cut_off(Brokers(1, 2, 3, silent=set(), coordinator_id=2), by=1, old=3), id="cut off"),
    ],
)
async def test_whoever_does_not_know_is_not_asked_again(brokers: Any) -> None:
    group = group_on(brokers())
    with pytest.raises(MembersUnknownError):
        await group.members()
    assert await group.members() == {"a": "a:1", "b": "b:1"}


def cut_off(brokers: Brokers, *, by: int, old: int) -> Brokers:
    brokers.said_by[by] = old
    return brokers


async def test_a_coordinator_that_has_moved_is_found() -> None:
    brokers = Brokers(1, 2, 3, silent={3}, coordinator_id=3)
    group = group_on(brokers)
    with pytest.raises(MembersUnknownError, match="broker 3"):
        await group.members()
    brokers.coordinator_id = 2
    assert await asyncio.wait_for(group.members(), 5) == {"a": "a:1", "b": "b:1"}
