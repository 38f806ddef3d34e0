"""What the client's tests share: producers on the shared coordinator, under names that no other test uses."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from oncebox.producer import Producer, ProducerSettings
from oncebox.writer_settings import WriterSettings
from tests.support.coordinator import Coordinators

NewProducer = Callable[..., Producer]


@pytest.fixture
def one(shared_coordinator: Coordinators) -> Coordinators:
    return shared_coordinator


def fresh(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def new_producer(one: Coordinators) -> NewProducer:
    """Settings of the producer and of its writer by name; `partitioner` too."""

    def make(transactional_id: str | None = None, *, partitioner: Any = None, **fields: Any) -> Producer:
        own = {name: fields.pop(name) for name in list(fields) if name in ProducerSettings.__dataclass_fields__}
        return Producer(
            one.bootstrap_servers,
            one.addresses,
            transactional_id=transactional_id or fresh("id"),
            settings=ProducerSettings(**own, writer=WriterSettings(**fields)),
            partitioner=partitioner,
        )

    return make
