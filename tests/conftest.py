"""Real parts for the tests, one file per resource. Each starts when the first test asks for it, once per run; a missing
prerequisite is told once, before the first test, not by every test that needs it.
"""

import gc
import os
import sys
from typing import Any

import pytest

from oncebox.local.java import JavaMissingError, find_java

pytest_plugins = [
    "tests.support.kafka",
    "tests.support.postgres",
    "tests.support.spark",
    "tests.support.coordinator",
    "tests.support.relay",
    "tests.support.profiles",
]

# fixture -> the marker its tests get
RESOURCES = {"kafka": "kafka", "kafka_cluster": "kafka", "postgres": "postgres", "spark": "spark"}
NEED_JAVA = {"kafka", "spark"}
SPARK_FOLDER = "tests/integration/reconcile"
PROFILE = "ONCEBOX_MODEL_PROFILE"  # of the tests themselves
# pyspark's collect() leaves closing its socket to the garbage collector.
SPARK_WARNING = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def pytest_configure() -> None:
    """Settings of the shell would lead commands and services of the tests to parts that are not theirs."""
    for name in [each for each in os.environ if each.startswith("ONCEBOX_") and each != PROFILE]:
        del os.environ[name]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in RESOURCES:
                item.add_marker(RESOURCES[fixture])
        if item.get_closest_marker("spark"):
            item.add_marker(SPARK_WARNING)
    # They stay together and take longest: whichever process has them must not be the last by far.
    items.sort(key=lambda item: not item.nodeid.startswith(SPARK_FOLDER))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `make test`, which runs several processes: a file stays together, and so do all that start Spark: its memory
    and downloads are enough once.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path, _, _ = nodeid.partition("::")
            return SPARK_FOLDER if path.startswith(SPARK_FOLDER) else path

    return ByFile(config, log)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What Spark has left to the garbage collector is found as long as it is not told, and not by another test."""
    if item.get_closest_marker("spark") and (nextitem is None or not nextitem.get_closest_marker("spark")):
        gc.collect()


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    needing = [item for item in session.items if any(item.get_closest_marker(name) for name in NEED_JAVA)]
    if needing:
        try:
            find_java()
        except JavaMissingError as error:
            raise pytest.UsageError(
                f"{error}\n{len(needing)} of the selected tests need it; the others: "
                "pytest -m 'not kafka and not spark'"
            ) from None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A run takes long: what fails is told at once, its reasons at the end."""
    # A worker's reports come a second time, from whoever started it.
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})", file=sys.__stderr__, flush=True)
