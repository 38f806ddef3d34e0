"""The process around an instance: what signals do to it, also while it starts."""

import sys
from pathlib import Path

import pytest

from proof.faults.process import ChildProcess

# An instance that is told something while it starts, and ends by SIGTERM once it has read its settings anew.
SCRIPT = """
import os, signal, sys
from functools import partial
from coordinator import __main__ as main
from oncebox.settings import load

class Instance:
    instance, address, http_port = "i", "here", 1

    def __init__(self, settings):
        self.settings = settings
        self.is_started = False

    async def start(self):
        if sys.argv[1] == "while it starts":
            os.kill(os.getpid(), signal.SIGHUP)
        self.is_started = True
        if sys.argv[1] == "later":
            main.asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGHUP)

    async def stop(self):
        print("stopped")

    def reload(self):
        print("read anew", self.is_started)
        os.kill(os.getpid(), signal.SIGTERM)

main.Instance = Instance
main.serve(partial(load, main.CoordinatorSettings))
"""


@pytest.mark.parametrize("when", ["while it starts", "later"])
def test_sighup_is_read_anew_whenever_it_comes(when: str, tmp_path: Path):
    environment = {"ONCEBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    command = [sys.executable, "-c", SCRIPT, when]
    with ChildProcess(command, log=tmp_path / "log", environment=environment) as process:
        assert process.wait() == 0, process.log_tail()
        assert process.log_contains("read anew True")
        assert process.log_contains("stopped")
