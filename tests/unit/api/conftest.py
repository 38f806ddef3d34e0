from collections.abc import AsyncIterator

import pytest

from tests.unit.api.bench import Bench, settings_for_tests


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(settings_for_tests())
    await bench.start()
    yield bench
    await bench.stop()
