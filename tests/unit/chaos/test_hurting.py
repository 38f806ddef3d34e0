"""What each fault does to which part: looked at while it lasts, and again when it is over. Processes are real."""

import os
import resource
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proof.chaos.client import FENCED
from proof.chaos.hurting import Hurting
from proof.chaos.network import BEFALLEN, NONE_CAME, NOT_SENT, STILL_AWAITED
from proof.chaos.parts import ChaosError, await_serving, until
from proof.faults.clock import NS_PER_S, OFFSET_NS, WallClock
from proof.faults.process import ChildProcess

SERVES = "echo serves at no port; "
STOPS = "trap 'exit 0' TERM; "
SLEEPS = "sleep 600 & wait"


class Meanwhile(threading.Event):
    """While a fault lasts, what `looks` finds is noted. `is_over`: the run ends just then."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: Callable[[], Any] = lambda: None
        self.noted: list[Any] = []
        self.is_over = False

    def wait(self, timeout: float | None = None) -> bool:
        self.noted.append(self.looks())
        return self.is_over


class Journal:
    """Stands for a part that is no process of ours; notes what is called."""

    pid: int

    def __init__(self, name: str, calls: list[str], **given: Any) -> None:
        self._name = name
        self._calls = calls
        self.__dict__ |= given

    def __getattr__(self, call: str) -> Callable[..., str]:
        def note(*arguments: Any) -> str:
            self._calls.append(" ".join([self._name, call, *map(_name, arguments)]))
            return ""

        return note


def _name(argument: Any) -> str:
    return str(getattr(argument, "_name", argument))


class Given:
    """Two of each service, three brokers, one client that is fenced and one of the database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[str] = []
        self.over = Meanwhile()
        self.children: list[ChildProcess] = []
        self.coordinators, self.relays, self.outboxes, self.copiers = (
            [self.child(f"{noun}-{number}") for number in (1, 2)]
            for noun in ("coordinator", "relay", "outbox", "copier")
        )
        self.clients = [self.seat("bank-1"), self.seat("outbox-1", is_fenced=False)]
        self.brokers = [Journal(f"broker {n}", self.calls, node_id=n) for n in (1, 2, 3)]
        self.parts: Any = self._parts()
        self.hurting = Hurting(self.parts, self.over)
        await_serving(self.children)

    def _parts(self) -> Any:
        return SimpleNamespace(
            coordinators=self.coordinators,
            relays=self.relays,
            outboxes=self.outboxes,
            copiers=self.copiers,
            services=[*self.coordinators, *self.relays, *self.outboxes, *self.copiers],
            clients=self.clients,
            kafka=Journal("kafka", self.calls, brokers=self.brokers),
            postgres=Journal("postgres", self.calls),
            network=Journal("network", self.calls),
            broker_proxies=[Journal(f"proxy {number}", self.calls) for number in (1, 2, 3)],
            coordinator_proxies=[Journal(f"coordinator proxy {number}", self.calls) for number in (1, 2)],
            postgres_proxy=Journal("postgres proxy", self.calls),
            hosts=Journal("hosts", self.calls),
            clock_of=self.clock_of,
            passer_by=lambda: self.child("passer", "for _ in 1 2 3 4; do echo leaves it open; done; " + SLEEPS),
        )

    def child(self, name: str, script: str = STOPS + SERVES + SLEEPS) -> ChildProcess:
        child = ChildProcess(["bash", "-c", script], log=self.folder / f"{name}.log")
        child.start()
        self.children.append(child)
        return child

    def seat(self, name: str, *, is_fenced: bool = True) -> Any:
        seat = SimpleNamespace(name=name, is_fenced=is_fenced, process=self.child(f"{name}.1"))
        seat.await_begin = lambda: self.calls.append(f"{name} has begun")

        def replace() -> None:
            self.calls.append(f"{name} is replaced")
            seat.process = self.child(f"{name}.2")

        seat.replace = replace
        return seat

    def clock_of(self, process: ChildProcess) -> WallClock:
        return WallClock(self.folder / "clocks" / process.log.stem)

    def clocks(self) -> dict[str, int]:
        """Those that are off, by how many seconds."""
        files = (self.folder / "clocks").iterdir()
        found = {path.name: OFFSET_NS.unpack(path.read_bytes())[0] // NS_PER_S for path in files}
        return {name: off for name, off in found.items() if off}

    def states(self) -> dict[str, str]:
        """Of those that do not run: killed or stopped."""
        found = {child.log.stem: _state(child) for child in self.children if child.log.stem != "passer"}
        return {name: state for name, state in found.items() if state != "runs"}

    def hurt(self, fault: str, pick: int = 1) -> str:
        return self.hurting.hurt(fault, pick, 0.0).target


def _state(child: ChildProcess) -> str:
    return _state_of(child.pid) if child.running else "killed"


def _state_of(pid: int) -> str:
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "stopped" if status == "T" else "runs"


@pytest.fixture
def given(tmp_path: Path) -> Iterator[Given]:
    given = Given(tmp_path)
    given.over.looks = given.states
    yield given
    for child in given.children:
        child.kill()


@pytest.mark.parametrize(
    ("fault", "pick", "state", "targets"),
    [
        ("kill-coordinator", 0, "killed", ["coordinator-1"]),
        ("kill-coordinator", 1, "killed", ["coordinator-2"]),
        ("pause-coordinator", 1, "stopped", ["coordinator-2"]),
        ("kill-all-coordinators", 1, "killed", ["coordinator-1", "coordinator-2"]),
        ("kill-copier", 0, "killed", ["copier-1"]),
        ("pause-copier", 1, "stopped", ["copier-2"]),
        ("pause-client", 0, "stopped", ["bank-1.1"]),
        ("pause-client", 1, "stopped", ["outbox-1.1"]),
    ],
)
def test_it_is_down_for_its_time_and_then_back(
    given: Given, fault: str, pick: int, state: str, targets: list[str]
) -> None:
    assert given.hurt(fault, pick) == ", ".join(targets)
    assert given.over.noted == [dict.fromkeys(targets, state)]
    assert given.states() == {}
    assert given.calls == []


@pytest.mark.parametrize(
    ("noun", "says"),
    [
        ("relay", ["active with fence 9", "active with fence 10"]),
        ("outbox", ["2026-01-01 09:00 INFO publishing from 3", "2026-01-01 10:00 INFO publishing from 2"]),
    ],
)
@pytest.mark.parametrize(("verb", "state"), [("kill", "killed"), ("pause", "stopped")])
def test_of_the_relays_mostly_the_one_that_works_is_hurt(
    given: Given, noun: str, says: list[str], verb: str, state: str
) -> None:
    for child, text in zip(given.parts.__dict__["outboxes" if noun == "outbox" else "relays"], says, strict=True):
        with child.log.open("a") as log:
            log.write(text + "\n")
    targets = Counter(given.hurt(f"{verb}-{noun}", pick) for pick in range(4))
    assert targets == {f"{noun}-2": 3, f"{noun}-1": 1}
    assert given.over.noted == [{target: state} for target in (f"{noun}-1", *[f"{noun}-2"] * 3)]
    assert given.states() == {}


def test_a_killed_client_has_a_successor(given: Given) -> None:
    assert given.hurt("kill-client", 0) == "bank-1.1"
    assert given.over.noted == [{"bank-1.1": "killed"}]
    assert given.calls == ["bank-1 is replaced"]
    assert given.states() == {"bank-1.1": "killed"}


def test_a_zombie_wakes_up_when_its_successor_works_and_has_to_end_as_fenced(given: Given) -> None:
    old = given.clients[0].process
    given.clients[0].await_begin = lambda: given.calls.append(f"begun, the old one {_state(old)}")
    old.argv = ["bash", "-c", f"trap 'kill $!; exit {FENCED}' CONT; {SERVES}{SLEEPS}"]
    old.restart()
    await_serving([old])
    assert given.hurt("zombie-client", 1) == "bank-1.1"
    assert given.over.noted == [{"bank-1.1": "stopped"}]
    assert given.calls == ["begun, the old one runs", "bank-1 is replaced", "begun, the old one stopped"]


def test_a_zombie_that_goes_on_is_told(given: Given) -> None:
    old = given.clients[0].process
    old.argv = ["bash", "-c", f"trap 'kill $!; exit 0' CONT; {SERVES}{SLEEPS}"]
    old.restart()
    await_serving([old])
    with pytest.raises(ChaosError, match="was replaced and woke up: it ended with 0, not as fenced"):
        given.hurt("zombie-client", 0)


@pytest.mark.parametrize("noun", ["relay", "outbox", "copier", "client"])
def test_a_clock_is_off_for_its_time_and_then_right(given: Given, noun: str) -> None:
    given.over.looks = given.clocks
    targets = [given.hurt(f"jump-{noun}", pick) for pick in (1, 11, 21, 31)]
    assert [target.partition(" by ")[2] for target in targets] == ["-21600 s", "-300 s", "300 s", "21600 s"]
    assert targets == [f"{name} by {off} s" for clocks in given.over.noted for name, off in clocks.items()]
    assert given.clocks() == {}


def test_a_coordinators_clock_jumps_both_ways_and_each_time_somebody_leaves_transactions_open(given: Given) -> None:
    passed: list[dict[str, int]] = []
    passer_by = given.parts.passer_by

    def passes_by() -> ChildProcess:
        passed.append(given.clocks())
        return passer_by()  # type: ignore[no-any-return]

    given.parts.passer_by = passes_by
    assert given.hurt("jump-coordinator", 21) == "coordinator-2 by 300 s"
    assert passed == [{"coordinator-2": 300}, {"coordinator-2": -300}]
    assert given.clocks() == {}
    assert given.over.noted == [{}]
    assert given.hurt("jump-coordinator", 141) == "coordinator-2 by 300 s"
    assert given.over.noted[1:] == [{"coordinator-2": "killed"}]
    assert given.states() == {}


@pytest.mark.parametrize("verb", ["late", "repeat", "lost"])
def test_every_broker_gets_every_kind_of_request_fault(given: Given, verb: str) -> None:
    fault = "lost-reply" if verb == "lost" else f"{verb}-request"
    targets = {given.hurt(fault, pick) for pick in range(9)}
    assert targets == {f"{request} to broker {number}" for request in BEFALLEN for number in (1, 2, 3)}
    assert {call.rpartition(" 0.0 ")[0] for call in given.calls} == {
        f"network befall {verb} proxy {number} {request}" for request in BEFALLEN for number in (1, 2, 3)
    }


@pytest.mark.parametrize("why_not", [NONE_CAME, STILL_AWAITED, NOT_SENT])
def test_a_request_fault_that_came_to_nothing_says_so(given: Given, why_not: str) -> None:
    given.parts.network = SimpleNamespace(befall=lambda *_: why_not)
    hurt = given.hurting.hurt("late-request", 5, 0.0)
    assert hurt == (f"WriteTxnMarkers to broker 3, {why_not}", False)


@pytest.mark.parametrize(
    ("fault", "target", "calls"),
    [
        ("kill-broker", "broker 2", ["broker 2 kill", "|", "broker 2 start"]),
        ("pause-broker", "broker 2", ["broker 2 pause", "|", "broker 2 resume"]),
        ("cut-broker", "broker 2", ["network cut proxy 2", "|", "network heal proxy 2"]),
        ("delay-broker", "broker 2", ["network delay proxy 2", "|", "network heal proxy 2"]),
        ("mute-broker", "broker 2", ["network mute proxy 2", "|", "network heal proxy 2"]),
        (
            "isolate-broker",
            "broker 2",
            ["hosts lose 0 1", "hosts lose 1 0", "hosts lose 2 1", "hosts lose 1 2", "|", "hosts heal"],
        ),
        ("deafen-broker", "broker 2", ["hosts lose 0 1", "hosts lose 2 1", "|", "hosts heal"]),
        (
            "cut-coordinator",
            "coordinator-2",
            ["network cut coordinator proxy 2", "|", "network heal coordinator proxy 2"],
        ),
        (
            "mute-coordinator",
            "coordinator-2",
            ["network mute coordinator proxy 2", "|", "network heal coordinator proxy 2"],
        ),
        (
            "delay-coordinator",
            "coordinator-2",
            ["network delay coordinator proxy 2", "|", "network heal coordinator proxy 2"],
        ),
        ("kill-postgres", "PostgreSQL", ["postgres kill", "|", "postgres restart"]),
        ("cut-postgres", "PostgreSQL", ["network cut postgres proxy", "|", "network heal postgres proxy"]),
        ("delay-postgres", "PostgreSQL", ["network delay postgres proxy", "|", "network heal postgres proxy"]),
        (
            "mute-postgres",
            "PostgreSQL",
            ["network mute postgres proxy", "|", "network heal postgres proxy", "network reset postgres proxy"],
        ),
        (
            "roll-brokers",
            "one after the other",
            [f"broker {n} stop|broker {n} start|kafka await_in_sync" for n in (1, 2, 3)],
        ),
    ],
)
def test_brokers_and_postgres(given: Given, fault: str, target: str, calls: list[str]) -> None:
    given.over.looks = lambda: given.calls.append("|")
    assert given.hurt(fault, 1) == target
    if fault == "roll-brokers":
        each = [each.split("|") for each in calls]
        calls = [call for stop, start, await_ in each for call in (stop, "|", start, await_)]
    assert given.calls == calls


def test_coordinators_are_rolled_one_at_a_time(given: Given) -> None:
    assert given.hurt("roll-coordinators") == "one after the other"
    assert given.over.noted == [{"coordinator-1": "killed"}, {"coordinator-2": "killed"}]
    assert given.states() == {}


def test_a_coordinator_that_does_not_stop_as_told_is_told(given: Given) -> None:
    given.coordinators[0].argv = ["bash", "-c", SERVES + SLEEPS]
    given.coordinators[0].restart()
    await_serving(given.coordinators)
    with pytest.raises(ChaosError, match="coordinator-1 was told to stop and ended with -15"):
        given.hurt("roll-coordinators")


@pytest.fixture
def server() -> Iterator["subprocess.Popen[bytes]"]:
    """With a child of its own, as PostgreSQL has them."""
    script = "sleep 600 & echo; wait"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()  # type: ignore[union-attr]
        yield process
        os.killpg(process.pid, 9)


def _tree(pid: int) -> list[int]:
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def test_a_paused_postgres_stands_still_with_all_its_processes(given: Given, server: "subprocess.Popen[bytes]") -> None:
    def are(state: str) -> bool:
        """A signal takes a moment to arrive."""
        return until(lambda: {_state_of(pid) for pid in _tree(server.pid)} == {state}, 30)

    given.parts.postgres.pid = server.pid
    given.over.looks = lambda: are("stopped")
    assert given.hurt("pause-postgres") == "PostgreSQL"
    assert given.over.noted == [True]
    assert are("runs")


@pytest.mark.parametrize(
    ("fault", "calls"),
    [("fill-broker", ["broker 2 kill", "broker 2 start"]), ("fill-postgres", ["postgres kill", "postgres restart"])],
)
def test_a_full_disk_is_one_on_which_no_file_grows(
    given: Given, server: "subprocess.Popen[bytes]", fault: str, calls: list[str]
) -> None:
    def limits() -> list[int]:
        return [resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] for pid in _tree(server.pid)]

    given.parts.postgres.pid = given.brokers[1].pid = server.pid
    given.over.looks = limits
    given.hurt(fault, 1)
    assert given.over.noted == [[0, 0]]
    assert given.calls == calls


def test_everything_is_killed_and_comes_back(given: Given) -> None:
    running = {child.log.stem for child in given.children}
    assert given.hurt("kill-everything") == "everything"
    assert given.over.noted == [dict.fromkeys(running, "killed")]
    assert given.states() == dict.fromkeys(("bank-1.1", "outbox-1.1"), "killed")  # which have successors
    assert given.calls[:4] == ["postgres kill", "broker 1 kill", "broker 2 kill", "broker 3 kill"]
    assert sorted(given.calls[5:8]) == ["broker 1 start", "broker 2 start", "broker 3 start"]
    assert given.calls[4::4] == ["postgres restart", "bank-1 is replaced"]


def test_when_the_run_is_over_what_is_down_stays_down(given: Given) -> None:
    given.over.is_over = True
    given.hurt("kill-coordinator", 0)
    given.hurt("kill-broker", 0)
    given.hurt("kill-client", 0)
    assert given.states() == {"coordinator-1": "killed", "bank-1.1": "killed"}
    assert given.calls == ["broker 1 kill"]


def test_a_fault_that_nobody_knows(given: Given) -> None:
    with pytest.raises(ChaosError, match="nobody knows how to do kill-time"):
        given.hurt("kill-time")
