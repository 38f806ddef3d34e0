"""The job by spark-submit on a standalone cluster: a real master and two workers on loopback."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oncebox.local.jars import cache_folder
from oncebox.local.java import find_java
from proof.faults.process import ChildProcess
from spark_jobs import package
from spark_jobs.session import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.reconcile import World

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[3]
MASTER_CLASS, WORKER_CLASS = (f"org.apache.spark.deploy.{name}" for name in ("master.Master", "worker.Worker"))
START_S = 180.0
# Half a minute on a machine of its own; five JVMs on a busy one take their time.
SUBMIT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    url: str
    master: ChildProcess
    workers: tuple[ChildProcess, ...]
    folder: Path
    environment: dict[str, str]

    def submit(self, world: World, *given: str, job: str = "reconcile", **more: str) -> ChildProcess:
        """Not waited for; a full run, where nothing else is `given`. `more` variables with settings."""
        archive = package.write(self.folder / "oncebox.zip")
        command = [
            *(str(BIN / "spark-submit"), "--master", self.url, "--py-files", str(archive)),
            *("--packages", ",".join(PACKAGES), "--conf", f"spark.jars.ivy={cache_folder() / 'ivy'}"),
            *("--conf", "spark.executor.memory=600m", "--conf", "spark.ui.enabled=false"),
            *("--conf", "spark.driver.bindAddress=127.0.0.1", "--conf", "spark.sql.shuffle.partitions=2"),
            *("--driver-memory", "700m", str(ROOT / "spark_jobs" / "jobs" / f"{job}.py"), *(given or ("--full",))),
        ]
        settings = {
            "ONCEBOX_BOOTSTRAP_SERVERS": world.servers,
            "ONCEBOX_DSN": world.dsn,
            "ONCEBOX_RECONCILE_FEED_TOPIC": world.coordinators.feed_topic,
            "ONCEBOX_RECONCILE_LOG_TOPIC": world.coordinators.log_topic,
            "ONCEBOX_RECONCILE_REPORT_FOLDER": str(self.folder / "reports"),
            **more,
        }
        return ChildProcess(command, log=self.folder / "submit.log", environment=self.environment | settings)

    def executors(self) -> int:
        """Of all workers, so far."""
        return len([path for path in (self.folder / "work").glob("app-*/*") if path.is_dir()])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    environment = {
        "JAVA_HOME": find_java(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path / "spark"),
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": "-XX:-UsePerfData -XX:TieredStopAtLevel=1",
    }
    started = []

    def start(name: str, *arguments: str) -> ChildProcess:
        process = ChildProcess(
            [str(BIN / "spark-class"), *arguments], log=tmp_path / f"{name}.log", environment=environment
        )
        process.start()
        started.append(process)
        return process

    try:
        ports = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        master = start("master", MASTER_CLASS, *ports)
        master.wait_ready(lambda: master.log_contains(r"Starting Spark master at \S+"), timeout_s=START_S)
        url = re.search(r"Starting Spark master at (spark://\S+)", master.log.read_text())
        assert url is not None
        for number in (1, 2):
            start(f"worker-{number}", WORKER_CLASS, *ports, "--cores", "1", "--memory", "700m", url[1])
        for worker in started[1:]:
            registered = partial(worker.log_contains, "Successfully registered with master")
            worker.wait_ready(registered, timeout_s=START_S)
        yield Cluster(url=url[1], master=master, workers=tuple(started[1:]), folder=tmp_path, environment=environment)
    finally:
        for process in reversed(started):
            process.kill()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_spark_submit_on_two_workers(world: World, cluster: Cluster):
    world.transfer(*range(1, 10))
    world.apply()
    world.run("DELETE FROM accounts WHERE id = 4")
    with cluster.submit(world) as submitted:
        code = submitted.wait(timeout_s=SUBMIT_S)
    told = submitted.log.read_text()
    assert "1 findings: 1 row missing" in told, told[-3000:]
    assert code == 1
    assert cluster.executors() >= 2


@pytest.mark.timeout(600)
def test_a_worker_that_dies_changes_no_verdict(world: World, cluster: Cluster):
    """It takes with it its share of what was read and kept: the other worker reads that again."""
    world.transfer(*range(1, 100))
    world.apply()
    world.run("UPDATE accounts SET balance = balance + 1 WHERE id % 10 = 0")
    with cluster.submit(world) as submitted:
        submitted.wait_ready(partial(submitted.log_contains, "buckets differ; comparing rows"), timeout_s=SUBMIT_S)
        assert cluster.executors() >= 2
        cluster.workers[0].kill()  # with its executor: they are one process group
        lost = partial(cluster.master.log_contains, "Telling app of lost executor")
        cluster.master.wait_ready(lost, timeout_s=START_S)
        assert submitted.running, "the worker died in the middle of the run"
        code = submitted.wait(timeout_s=SUBMIT_S)
    told = submitted.log.read_text()
    assert "9 findings: 9 row differs" in told, told[-3000:]
    assert code == 1
    assert "Traceback" not in told, told[-3000:]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_table_is_rebuilt_on_two_workers(world: World, cluster: Cluster):
    world.transfer(*range(1, 10))
    world.apply()
    before = world.run("SELECT * FROM accounts ORDER BY id")
    world.run("UPDATE accounts SET balance = balance + 1 WHERE id = 3")
    world.run("DELETE FROM accounts WHERE id = 4")
    with cluster.submit(world, "public.accounts", "--apply", job="backfill") as submitted:
        code = submitted.wait(timeout_s=SUBMIT_S)
    told = submitted.log.read_text()
    assert "0 deleted, 1 changed, 1 inserted" in told, told[-3000:]
    assert code == 0
    assert world.run("SELECT * FROM accounts ORDER BY id") == before


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_any_worker_nothing_is_concluded(world: World, cluster: Cluster):
    """Spark would wait for another worker for ever."""
    world.transfer(*range(1, 100))
    world.apply()
    world.run("UPDATE accounts SET balance = balance + 1 WHERE id % 10 = 0")
    with cluster.submit(world, ONCEBOX_RECONCILE_WORKERS_WAIT_MS="3000") as submitted:
        submitted.wait_ready(partial(submitted.log_contains, "buckets differ; comparing rows"), timeout_s=SUBMIT_S)
        for worker in cluster.workers:
            worker.kill()
        assert submitted.running, "the workers died in the middle of the run"
        code = submitted.wait(timeout_s=START_S)
    told = submitted.log.read_text()
    assert "nothing could be concluded: the cluster has had no worker for 3 s" in told, told[-3000:]
    assert code == 2
    assert "Traceback" not in told, told[-3000:]
