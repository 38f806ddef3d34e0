"""Hosts of their own, between which packets are lost. It takes root, and a process that leaves our network for good."""

import subprocess
import sys
from pathlib import Path

import pytest

from proof.faults.hosts import obstacle

ROOT = Path(__file__).parents[2]
WHY_NOT = obstacle()
# One listens on a host and answers what it hears; the other, on another host, asks again and again.
ECHO = "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); c, _ = s.accept()\n"
ECHO += "while d := c.recv(1): c.sendall(d)"
SCRIPT = f"""
import os, socket, subprocess, sys
from pathlib import Path
from proof.faults.hosts import Hosts, HostsError, enter_own_network

machine = os.readlink("/proc/self/ns/net")
enter_own_network()
assert os.readlink("/proc/self/ns/net") != machine
with Hosts(3) as hosts:
    first, second = hosts.host(0), hosts.host(1)
    echo = subprocess.Popen([*first.enter, sys.executable, "-c", {ECHO!r}, first.address])
    asker = subprocess.Popen(
        [*second.enter, sys.executable, "-u", "-m", "tests.support.asker", first.address, "7000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )

    def ask(wait_s):
        print(wait_s, file=asker.stdin, flush=True)
        return asker.stdout.readline().strip()

    print("at first", ask(60))
    for lost in ((0, 1), (1, 0)):
        hosts.lose(*lost)
        print("lost", lost, ask(1))
        hosts.heal()
        print("healed", ask(60))
    hosts.lose(0, 2)
    print("others", ask(60))
    hosts.heal()
    asker.stdin.close()
    assert asker.wait(60) == echo.wait(60) == 0
assert "hosts" not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
"""


def machines_links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(WHY_NOT is not None, reason=f"no hosts here: {WHY_NOT}")
def test_what_is_lost_between_two_hosts_arrives_once_it_is_healed() -> None:
    before = machines_links()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "at first heard",
        "lost (0, 1) nothing",
        "healed heard",
        "lost (1, 0) nothing",
        "healed heard",
        "others heard",
    ]
    assert machines_links() == before
