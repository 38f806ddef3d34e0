"""What each fault does to which part, and how it is healed again. Every fault blocks until all is as it was."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from proof.chaos.client import FENCED, LEAVES, PASSER_BY_IDS
from proof.chaos.nemesis import FAULTS
from proof.chaos.network import BEFALLEN
from proof.chaos.parts import ChaosError, ClientSeat, Parts, await_serving
from proof.faults.process import ChildProcess, ProcessError
from proof.faults.proxy import Proxy

FENCED_S = 60.0
STOP_S = 60.0
# One in so many faults of a relay is of the one that stands by.
STANDBY_EVERY = 4
# How far a clock is off, and long enough for a passer-by to come in between.
JUMPS_S = (-6 * 3600, -300, 300, 6 * 3600)
PASSES_BY_S = 30.0
LEFT_OPEN = f"(?s)({LEAVES}.*){{{PASSER_BY_IDS}}}"
# What a relay says when it begins to work: with a fence, or at a time; the higher, the later.
WORKS = {
    "relay": re.compile(r"active with fence (\d+)"),
    "outbox": re.compile(r"^(\S+ \S+) .* publishing from", re.MULTILINE),
}


class Hurt(NamedTuple):
    """To whom it was done."""

    target: str
    # False: nothing has happened, for no request that it was meant for came in its time, or none was late in the end.
    had_effect: bool = True


class Hurting:
    """`over` ends all waiting; what is down then need not come back."""

    def __init__(self, parts: Parts, over: threading.Event) -> None:
        self._parts = parts
        self._over = over

    def hurt(self, fault: str, pick: int, down_s: float) -> Hurt:
        """Does it, waits, and heals what it did."""
        verb, _, noun = fault.partition("-")
        if noun in {"request", "reply"}:
            return self._befall(verb, pick, down_s)
        return Hurt(self._hurt(verb, noun, pick, down_s))

    def _befall(self, verb: str, pick: int, down_s: float) -> Hurt:
        """The broker and the kind of request are picked apart: every broker gets every kind."""
        proxies = self._parts.broker_proxies
        number = pick % len(proxies)
        request = list(BEFALLEN)[pick // len(proxies) % len(BEFALLEN)]
        why_not = self._parts.network.befall(verb, proxies[number], request, down_s, self._over)
        target = f"{request} to broker {self._parts.kafka.brokers[number].node_id}"
        return Hurt(f"{target}, {why_not}" if why_not else target, had_effect=not why_not)

    def _hurt(self, verb: str, noun: str, pick: int, down_s: float) -> str:
        parts = self._parts
        match noun:
            case "everything":
                return self._kill_everything(down_s)
            case "all-coordinators":
                return self._kill(parts.coordinators, down_s)
            case "coordinators":
                return self._roll_coordinators(down_s)
            case "brokers":
                return self._roll_brokers(down_s)
            case "client":
                return self._hurt_client(verb, pick, down_s)
            case "broker":
                return self._hurt_broker(verb, pick % len(parts.kafka.brokers), down_s)
            case "postgres":
                return self._hurt_postgres(verb, down_s)
            case "coordinator":
                number = pick % len(parts.coordinators)
                proxy, process = parts.coordinator_proxies[number], parts.coordinators[number]
                if verb in {"cut", "delay", "mute"}:
                    return self._disturb(verb, proxy, process.log.stem, down_s)
                return self._hurt_process(verb, process, pick, down_s)
            case "copier":
                return self._hurt_process(verb, parts.copiers[pick % len(parts.copiers)], pick, down_s)
            case "relay":
                return self._hurt_process(verb, _to_hurt(parts.relays, noun, pick), pick, down_s)
            case "outbox":
                return self._hurt_process(verb, _to_hurt(parts.outboxes, noun, pick), pick, down_s)
        raise ChaosError(f"nobody knows how to do {verb}-{noun}")

    def _hurt_process(self, verb: str, process: ChildProcess, pick: int, down_s: float) -> str:
        if verb == "kill":
            return self._kill([process], down_s)
        if verb == "jump":
            return self._jump(process, pick, down_s)
        process.pause()
        self._over.wait(down_s)
        process.resume()
        return process.log.stem

    def _jump(self, process: ChildProcess, pick: int, down_s: float) -> str:
        """There and back: its clock jumps forwards as well as backwards."""
        clock = self._parts.clock_of(process)
        offset_s = JUMPS_S[pick // 10 % len(JUMPS_S)]
        clock.jump(offset_s)
        if process in self._parts.coordinators:
            # One that starts at the wrong time goes on with it: from then on the two of them disagree.
            starts_anew = pick // 100 % 2 == 1
            self._kill([process] if starts_anew else [], down_s)
            self._pass_by()
            clock.jump(-offset_s)
            self._pass_by()
        else:
            self._over.wait(down_s)
        clock.jump(0)
        return f"{process.log.stem} by {offset_s} s"

    def _pass_by(self) -> None:
        """Somebody leaves transactions open that nothing but their timeout will end: what is counted by a clock that
        jumps would hold their partitions back for hours.
        """
        process = self._parts.passer_by()
        # Another fault may keep it from it.
        with suppress(ProcessError):
            process.wait_ready(lambda: process.log_contains(LEFT_OPEN), timeout_s=PASSES_BY_S)
        process.kill()

    def _kill(self, processes: Sequence[ChildProcess], down_s: float) -> str:
        for process in processes:
            process.kill()
        if not self._over.wait(down_s):
            for process in processes:
                process.start()
            await_serving(processes)
        return ", ".join(process.log.stem for process in processes)

    def _disturb(self, verb: str, proxy: Proxy, name: str, down_s: float) -> str:
        network = self._parts.network
        {"cut": network.cut, "delay": network.delay, "mute": network.mute}[verb](proxy)
        self._over.wait(down_s)
        network.heal(proxy)
        return name

    def _roll_coordinators(self, down_s: float) -> str:
        for process in self._parts.coordinators:
            code = process.stop(timeout_s=STOP_S)
            if code != 0:
                raise ChaosError(f"{process.log.stem} was told to stop and ended with {code}")
            if self._over.wait(down_s):
                break
            process.start()
            await_serving([process])
        return "one after the other"

    def _roll_brokers(self, down_s: float) -> str:
        for broker in self._parts.kafka.brokers:
            broker.stop()
            if self._over.wait(down_s):
                break
            broker.start()
            self._parts.kafka.await_in_sync()
        return "one after the other"

    def _hurt_client(self, verb: str, pick: int, down_s: float) -> str:
        """A client of the database has no successor that it could get in the way of, and looks at no clock."""
        fenced = [seat for seat in self._parts.clients if seat.is_fenced]
        seats = fenced if verb in {"zombie", "jump"} else self._parts.clients
        seat = seats[pick % len(seats)]
        old = seat.process
        if verb in {"pause", "jump"}:
            return self._hurt_process(verb, old, pick, down_s)
        if verb == "kill":
            old.kill()
            if not self._over.wait(down_s):
                seat.replace()
            return old.log.stem
        return self._make_zombie(seat, down_s)

    def _make_zombie(self, seat: ClientSeat, down_s: float) -> str:
        old = seat.process
        # One that is still about to take its id would lawfully take it from its successor when it wakes up.
        seat.await_begin()
        old.pause()
        seat.replace()
        self._over.wait(down_s)
        seat.await_begin()
        old.resume()
        code = old.wait(timeout_s=FENCED_S)
        if code != FENCED:
            raise ChaosError(f"{old.log.stem} was replaced and woke up: it ended with {code}, not as fenced")
        return old.log.stem

    def _hurt_broker(self, verb: str, number: int, down_s: float) -> str:
        broker = self._parts.kafka.brokers[number]
        name = f"broker {broker.node_id}"
        if verb == "pause":
            broker.pause()
            self._over.wait(down_s)
            broker.resume()
        elif verb == "kill":
            broker.kill()
            if not self._over.wait(down_s):
                broker.start()
        elif verb == "fill":
            _fill_disk(broker.pid)
            if not self._over.wait(down_s):
                broker.kill()
                broker.start()
        elif FAULTS[f"{verb}-broker"].needs_host:
            self._split_off(verb, number, down_s)
        else:
            self._disturb(verb, self._parts.broker_proxies[number], name, down_s)
        return name

    def _split_off(self, verb: str, number: int, down_s: float) -> None:
        """From the other brokers; clients reach all of them."""
        hosts = self._parts.hosts
        if hosts is None:
            raise ChaosError("the brokers have no hosts of their own")
        for other in range(len(self._parts.kafka.brokers)):
            if other != number:
                hosts.lose(other, number)
                if verb == "isolate":
                    hosts.lose(number, other)
        self._over.wait(down_s)
        hosts.heal()

    def _hurt_postgres(self, verb: str, down_s: float) -> str:
        postgres = self._parts.postgres
        if verb == "pause":
            paused = [postgres.pid, *_children(postgres.pid)]
            for pid in paused:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            self._over.wait(down_s)
            for pid in paused:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        elif verb == "kill":
            postgres.kill()
            if not self._over.wait(down_s):
                postgres.restart()
        elif verb == "fill":
            _fill_disk(postgres.pid)
            if not self._over.wait(down_s):
                postgres.kill()
                postgres.restart()
        else:
            self._disturb(verb, self._parts.postgres_proxy, "PostgreSQL", down_s)
            if verb == "mute":
                # A proxy answers the keepalives for it, so nobody would ever hear that the connection is not whole any
                # more. Over a network the first packet that passes again would tell.
                self._parts.network.reset(self._parts.postgres_proxy)
        return "PostgreSQL"

    def _kill_everything(self, down_s: float) -> str:
        parts = self._parts
        for process in [*parts.services, *(seat.process for seat in parts.clients)]:
            process.kill()
        parts.postgres.kill()
        for broker in parts.kafka.brokers:
            broker.kill()
        if self._over.wait(down_s):
            return "everything"
        parts.postgres.restart()
        # A broker is up when there is a majority of them.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda broker: broker.start(), parts.kafka.brokers))
        for process in parts.services:
            process.start()
        await_serving(parts.services)
        for seat in parts.clients:
            seat.replace()
        return "everything"


def _to_hurt(relays: Sequence[ChildProcess], noun: str, pick: int) -> ChildProcess:
    """Mostly the one that works: of the other not much is lost."""

    def began(process: ChildProcess) -> tuple[int, str]:
        *_, last = ["", *WORKS[noun].findall(process.log.read_text())]
        return len(last), last

    *others, active = sorted(relays, key=began)
    return active if pick % STANDBY_EVERY else others[-1]


def _fill_disk(pid: int) -> None:
    """To it, what it has started and whatever it starts: no file gets longer any more."""
    # As its own user: PostgreSQL is not root's, even where we are, and not every root may limit others.
    owner = os.stat(f"/proc/{pid}")
    for each in [pid, *_children(pid)]:
        limit = ["prlimit", f"--pid={each}", "--fsize=0:unlimited"]
        # A child may have ended meanwhile.
        subprocess.run(limit, user=owner.st_uid, group=owner.st_gid, check=each == pid, stderr=subprocess.DEVNULL)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
