"""The log level of a coordinator, changed while it runs, as an operator does it: the file, then SIGHUP."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from proof.faults.process import ChildProcess

if TYPE_CHECKING:
    from oncebox.local import LocalKafka

ONCEBOX = str(Path(sys.executable).with_name("oncebox"))
READ_ANEW = "settings read anew"


def test_the_log_level_changes_while_it_runs(kafka: LocalKafka, tmp_path: Path):
    suffix, file = uuid.uuid4().hex[:6], tmp_path / "coordinator.yaml"
    settings = {
        "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
        "log_topic": f"oncebox.log.{suffix}",
        "feed_topic": f"oncebox.commits.{suffix}",
        "log_partitions": 1,
        "listen_port": 0,
        "http_port": 0,
    }

    def write(**changes: object) -> None:
        file.write_text(yaml.safe_dump(settings | changes))

    write(log_level="WARNING")
    command = [ONCEBOX, "coordinator", "run", "--config", str(file)]
    with ChildProcess(command, log=tmp_path / "log") as process:

        def reload() -> None:
            os.kill(process.pid, signal.SIGHUP)

        process.wait_ready(lambda: process.log_contains("serves at"), timeout_s=120)
        assert not process.log_contains(" INFO ")
        write(log_level="INFO")
        reload()
        process.wait_ready(lambda: process.log_contains(READ_ANEW))
        # At this level only the warning of what waits for a restart is told.
        write(log_level="WARNING", drain_ms=1_234)
        reload()
        process.wait_ready(lambda: process.log_contains("only after a restart: drain_ms"))
        write(log_level="INFO")
        reload()
        process.wait_ready(lambda: process.log.read_text().count(READ_ANEW) > 1)
        assert process.stop() == 0
        assert process.log.read_text().count(READ_ANEW) == 2
