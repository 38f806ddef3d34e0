"""One run: parts up, clients at work, faults by the schedule, heal, read everything, judge."""

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from oncebox.local.jars import kafka_jars
from proof.chaos import ending, summary
from proof.chaos.book import Book
from proof.chaos.checks import check
from proof.chaos.history import Fault, Finished, Healed, Recorder, Stuck, merge, now_ns, read
from proof.chaos.hurting import Hurting
from proof.chaos.nemesis import FAULTS, Round, Step, rounds
from proof.chaos.parts import ChaosError, Parts
from proof.chaos.planted import BUGS
from proof.chaos.watch import Looker, Poller
from proof.chaos.workload import MONEY
from proof.faults.hosts import enter_own_network, obstacle

TELL_EVERY_S = 10.0
# After the last fault, before the clients are told to stop.
CALM_AFTER_S = 2.0


class Chaos:
    def __init__(
        self,
        folder: Path,
        *,
        seconds: float,
        seed: int,
        faults: Sequence[str],
        planted: str = "",
        move: Callable[[float], None] | None = None,  # told how many of the seconds have passed
    ) -> None:
        self.folder = folder
        self._seconds = seconds
        self._seed = seed
        self._faults = faults
        self._planted = planted
        self._move = move or (lambda _passed_s: None)
        self._begun_s = time.monotonic()
        self._over = threading.Event()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun_s:6.1f} s  {text}", flush=True)

    def run(self, *, json_path: Path | None = None) -> bool:
        """Whether nothing was found; with a planted bug: whether it was caught."""
        self.say(f"seed {self._seed}, {self._seconds:g} s of {', '.join(self._faults)}")
        histories = self.folder / "history"
        with _interruptible(), ExitStack() as running:
            recorder = running.enter_context(Recorder(histories / "run.jsonl"))
            bug = BUGS.get(self._planted)
            with_hosts = any(FAULTS[fault].needs_host for fault in self._faults)
            parts = Parts(self.folder, running, self._seed, self.say, planted=self._planted, with_hosts=with_hosts)
            hurting = Hurting(parts, self._over)
            isolation = "read_uncommitted" if self._planted == "dirty-reads" else "read_committed"
            poller = Poller("consumer", histories / "consumer.jsonl", parts.servers, isolation=isolation)
            looker = Looker("looker", histories / "looker.jsonl", parts.dsn)
            try:
                # They look on until all is read: what they have seen then has to be all of it.
                with poller, looker:
                    self._hurt(parts, hurting, recorder, poller, looker)
                    self._heal(parts, recorder)
                    self._read(parts, recorder)
                recorder.add(Finished(at_ns=now_ns(), money=MONEY))
            finally:
                self._over.set()  # whoever is being hurt need not be started again
        target = self.folder / "history.jsonl"
        merge(sorted(histories.glob("*.jsonl")), target)
        book = Book(read(target))
        findings = check(book)
        self.say(f"history in {target}; all parts are stopped\n")
        print(summary.as_text(book, findings), flush=True)
        if json_path is not None:
            found = {"seed": self._seed, **summary.as_json(book, findings)}
            json_path.write_text(json.dumps(found, indent=2) + "\n")
        if bug is None:
            return not findings
        caught = sorted({finding.check for finding in findings} & bug.caught_by)
        print(f"planted           {self._planted}: {'caught by ' + ', '.join(caught) if caught else 'not caught'}")
        return bool(caught)

    def _hurt(self, parts: Parts, hurting: Hurting, recorder: Recorder, poller: Poller, looker: Looker) -> None:
        deadline_s = time.monotonic() + self._seconds
        tell_s = time.monotonic()
        count = 0
        for each in rounds(self._seed, self._faults):
            if time.monotonic() + each.calm_s > deadline_s:
                break
            time.sleep(each.calm_s)
            self._look_after(parts, recorder)
            self._play(each, hurting, recorder)
            count += len(each.steps)
            self._move(self._seconds - max(0.0, deadline_s - time.monotonic()))
            if time.monotonic() - tell_s > TELL_EVERY_S:
                tell_s = time.monotonic()
                self.say(f"{count} faults; {poller.count} records read, {looker.count} rows in PostgreSQL")
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        self._move(self._seconds)

    def _play(self, each: Round, hurting: Hurting, recorder: Recorder) -> None:
        """All its faults at once, until all are healed again."""
        threads = [
            threading.Thread(target=self._step, args=(step, hurting, recorder), name=step.fault, daemon=True)
            for step in each.steps
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _step(self, step: Step, hurting: Hurting, recorder: Recorder) -> None:
        at_ns = now_ns()
        try:
            target, had_effect = hurting.hurt(step.fault, step.pick, step.down_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs into the history
            recorder.add(Stuck(at_ns=now_ns(), what=f"{step.fault}: {error}"))
            target, had_effect = f"stuck: {error}", True
        until_ns = now_ns()
        recorder.add(Fault(at_ns=at_ns, fault=step.fault, target=target, until_ns=until_ns, had_effect=had_effect))
        self.say(f"{step.fault}: {target} ({(until_ns - at_ns) / 1e9:.1f} s)")

    def _look_after(self, parts: Parts, recorder: Recorder) -> None:
        """A part that ended by itself is a finding; it is started again all the same."""
        for what in parts.look_after():
            recorder.add(Stuck(at_ns=now_ns(), what=what))

    def _heal(self, parts: Parts, recorder: Recorder) -> None:
        self._look_after(parts, recorder)
        recorder.add(Healed(at_ns=now_ns()))
        self.say("all is healed; every client has to commit again")
        ending.await_commits(parts)
        time.sleep(CALM_AFTER_S)
        ending.stop_clients(parts, recorder)

    def _read(self, parts: Parts, recorder: Recorder) -> None:
        self.say("asking for outcomes, reading all topics and tables")
        # First: whoever asks takes the id, and so would end what only its timeout may.
        ending.await_stable(parts, recorder)
        merge(sorted(parts.histories.glob("*.jsonl")), self.folder / "partial.jsonl")
        book = Book(read(self.folder / "partial.jsonl"))
        ending.ask(parts, book, recorder)
        wanted = ending.ask_database(parts, book, recorder)
        (self.folder / "partial.jsonl").unlink()
        count = ending.read_topics(parts, wanted, recorder)
        ending.read_markers(parts, recorder)
        ending.read_log(parts, recorder)
        ending.read_tables(parts, count, recorder)


def prepare_folder(folder: Path, *, is_ours: bool) -> None:
    """A folder of the user's must be empty; our own is emptied."""
    if is_ours:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists() and any(folder.iterdir()):
        raise ChaosError(f"{folder} is not empty: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)


def prepare_hosts(faults: Sequence[str]) -> list[str]:
    """Those that can be had here. Where some of them need hosts of their own, this process moves into another network:
    to be called before any other thread runs.
    """
    needing = [fault for fault in faults if FAULTS[fault].needs_host]
    if not needing:
        return list(faults)
    why_not = obstacle()
    if why_not is None:
        kafka_jars(print)  # nothing can be downloaded from there
        enter_own_network()
        return list(faults)
    if len(needing) == len(faults):
        raise ChaosError(f"no {' and no '.join(needing)} here: {why_not}")
    print(f"without {' and '.join(needing)}: {why_not}", flush=True)
    return [fault for fault in faults if fault not in needing]


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: the parts are stopped on the way out."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
