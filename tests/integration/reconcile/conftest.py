from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from oncebox.settings import kafka_settings
from spark_jobs.compare import Run
from spark_jobs.reconcile import reconcile
from spark_jobs.snapshot import Snapshot, take_cut
from tests.support.reconcile import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spark_jobs.result import Result
    from tests.support.coordinator import Coordinators


@pytest.fixture
def world(shared_coordinator: Coordinators, database: str, tmp_path: Path) -> Iterator[World]:
    made = World(shared_coordinator, database, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def begun(spark: Any, world: World) -> Callable[..., AbstractContextManager[Run]]:
    """A run of which a test takes the step that it is about, without comparing all tables."""

    @contextmanager
    def begin(**settings: Any) -> Iterator[Run]:
        given = world.settings(**settings)
        kafka = kafka_settings(given.kafka)
        with Snapshot(world.dsn) as snapshot:
            cut = take_cut(snapshot, kafka, relay="", feed_topic=given.feed_topic, is_full=True)
            yield Run(
                spark=spark,
                settings=given,
                kafka=kafka,
                snapshot=snapshot,
                cut=cut,
                since=None,
                progress=lambda _: None,
            )

    return begin


@pytest.fixture
def check(spark: Any, world: World) -> Callable[..., Result]:
    def run(**settings: Any) -> Result:
        result, _, _ = reconcile(spark, world.settings(**settings), lambda _: None)
        return result

    return run
