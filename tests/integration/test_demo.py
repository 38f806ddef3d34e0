"""The demo as a newcomer runs it, smaller."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long  # starts three brokers, Spark and all services of its own
@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_the_story_comes_to_its_end(tmp_path):
    command = [str(Path(sys.executable).with_name("oncebox")), "demo", "--transfers", "200", "--clients", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EXACTLY ONCE" in done.stdout
    assert "RECONCILED (clean: " in done.stdout
    report = done.stdout.partition("report: ")[2].splitlines()[0]
    assert "<svg" in (tmp_path / report).read_text()
