"""Runs a story: commands, `----`, what comes of them. The language is the table at the end of this file.

A story keeps every grant that was ever handed out, so any of them can be used again (`as=1`): that is what zombies do.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from coordinator.core.clocks import Clocks
from coordinator.core.commands import (
    Abort,
    Accepted,
    Command,
    Complete,
    Decision,
    End,
    Expire,
    ForceFence,
    GetOutcome,
    Heartbeat,
    InitProducer,
    Prepare,
    Register,
    Timeout,
)
from coordinator.core.grants import Limits
from coordinator.core.records import (
    Contents,
    Grant,
    GroupOffset,
    GroupOffsets,
    GroupPartition,
    Result,
    Run,
    TopicPartition,
    Written,
    grant_of,
)
from tests.model.desk import Desk
from tests.scenarios.words import describe_decision, describe_state

TIMEOUT_MS = 60_000
OFFSETS_PARTITION = 7
UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_ms(text: str) -> int:
    match = re.fullmatch(r"(\d+)(ms|s|m|h|d)", text)
    if match is None:
        raise ValueError(f"not a duration: {text!r}")
    return int(match[1]) * UNITS[match[2]]


def partition_of(word: str) -> TopicPartition:
    """p3 is partition 3 of the stories' one topic."""
    return TopicPartition("t", int(word.removeprefix("p")))


@dataclass(slots=True)
class Line:
    verb: str
    id: str
    words: tuple[str, ...]
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "Line":
        verb, *rest = text.split()
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        plain = [word for word in rest if "=" not in word]
        return cls(verb, plain[0] if plain else "", tuple(plain[1:]), options)

    def flag(self, word: str) -> bool:
        return word in self.words

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        return frozenset(partition_of(word) for word in self.words if re.fullmatch(r"p\d+", word))

    @property
    def groups(self) -> frozenset[GroupPartition]:
        names = self.options.get("group", "")
        return frozenset(GroupPartition(name, OFFSETS_PARTITION) for name in names.split(",") if name)

    @property
    def begun_ms_ago(self) -> int | None:
        return duration_ms(self.options["begun"]) if "begun" in self.options else None

    @property
    def contents(self) -> Contents:
        """p0=0-3,5 wrote the offsets 0, 1, 2 and 5; offsets=g carries an offset of the group g."""
        written = []
        for key, value in self.options.items():
            if re.fullmatch(r"p\d+", key):
                bounds = [(int(a), int(b or int(a) + 1)) for a, b in re.findall(r"(\d+)(?:-(\d+))?", value)]
                runs = tuple(Run(first, following) for first, following in bounds)
                count = sum(following - first for first, following in bounds)
                partition = partition_of(key)
                written.append(Written(topic="t", partition=partition.partition, record_count=count, runs=runs))
        group = self.options.get("offsets")
        offsets = (GroupOffset(topic="in", partition=0, offset_next=1),)
        return Contents(
            written=tuple(written),
            group_offsets=(GroupOffsets(group_id=group, offsets=offsets),) if group else (),
            metadata=self.options.get("token", "").encode(),
        )


@dataclass(slots=True)
class Story:
    desk: Desk = field(default_factory=lambda: Desk(limits=Limits(outcomes_kept=8)))
    clocks: Clocks = field(default_factory=lambda: Clocks(timeout_max_ms=600_000))
    grants: dict[tuple[str, int], Grant] = field(default_factory=dict)
    # How many topics have had the stories' one name.
    topics: int = 1

    def run(self, text: str) -> list[str]:
        line = Line.parse(text)
        if line.verb == "failed":
            # Its append failed: decided, but never written.
            line = Line.parse(text.removeprefix("failed "))
            decision = self.desk.ask(COMMANDS[line.verb](self, line))
            return [f"{line.id} would be: {describe_decision(decision, self.desk.now_ms)}", "  unchanged"]
        if line.verb in COMMANDS:
            return list(self._call(COMMANDS[line.verb](self, line)))
        return list(ACTS[line.verb](self, line))

    def _call(self, command: Command) -> Iterator[str]:
        if isinstance(command, Register | Prepare | End):
            command = replace(command, topic_ids={"t": b"%d" % self.topics})
        before = self.desk.state.get(command.transactional_id)
        decision = self.desk.call(command)
        yield f"{command.transactional_id} {describe_decision(decision, self.desk.now_ms)}"
        yield from self._show(command.transactional_id, unchanged=self._after(command, decision) == before)

    def _after(self, command: Command, decision: Decision) -> object:
        state = self.desk.state.get(command.transactional_id)
        if state is not None:
            self.grants.setdefault((state.transactional_id, state.number), grant_of(state))
            if isinstance(decision, Accepted) and (decision.records or isinstance(command, Heartbeat | Register)):
                self.clocks.tick(state, command, self.desk.now_ms)
        return state

    def _show(self, transactional_id: str, *, unchanged: bool) -> Iterator[str]:
        state = self.desk.state.get(transactional_id)
        if unchanged:
            yield "  unchanged"
        elif state is None:
            yield f"  gone; numbers go on above {self.desk.state.number_floor}"
        else:
            yield from describe_state(state, self.desk.unpaid(transactional_id))

    def grant(self, line: Line) -> Grant:
        """as=2, or as=2:1001:4 to make one up; else the id's newest."""
        text = line.options.get("as")
        if text is None:
            return self.grants[max(key for key in self.grants if key[0] == line.id)]
        number, *forged = map(int, text.split(":"))
        if forged:
            return Grant(number=number, producer_id=forged[0], epoch=forged[1])
        return self.grants[line.id, number]

    # --- what is not a call -----------------------------------------------------------------------------------------

    def pay(self, line: Line) -> Iterator[str]:
        debt = self.desk.debt(line.id, int(line.words[0]))
        self.desk.write_manifest(debt)
        for partition in line.partitions or debt.partitions:
            self.desk.acknowledge(debt, partition)
        owed = self.desk.unpaid(line.id).get(debt.number)
        yield f"{line.id} {debt.number} is paid" if owed is None else f"{line.id} {debt.number} is paid in part"

    def drop(self, line: Line) -> Iterator[str]:
        debt = self.desk.debt(line.id, int(line.words[0]))
        self.desk.write_manifest(debt)
        for partition in line.partitions or debt.partitions:
            self.desk.drop(debt, partition)
        yield f"{line.id} {debt.number} gives up its markers"

    def recreate(self, _: Line) -> Iterator[str]:
        self.topics += 1
        yield f"another topic has the name, the {self.topics}. so far"

    def advance(self, line: Line) -> Iterator[str]:
        self.desk.advance(duration_ms(line.id))
        yield from ()

    def sweep(self, _: Line) -> Iterator[str]:
        expired = list(self.clocks.expired(self.desk.now_ms))
        for command in expired:
            yield f"{command.transactional_id} {command.number} has timed out"
            yield from self._call(command)
        if not expired:
            yield "nothing has timed out"

    def crash(self, line: Line) -> Iterator[str]:
        self.desk.crash(compact=line.id == "compacted")
        self.clocks = Clocks(timeout_max_ms=600_000)
        for state in self.desk.state:
            self.clocks.tick(state, None, self.desk.now_ms)
            yield from describe_state(state, self.desk.unpaid(state.transactional_id))

    def plant(self, line: Line) -> Iterator[str]:
        """Puts the id's present slot at an epoch that would take long to reach."""
        state = self.desk.state.get(line.id)
        if state is None:
            raise ValueError(f"{line.id} is unknown")
        slots = list(state.slots)
        slots[state.slot] = replace(slots[state.slot], epoch=int(line.options["epoch"]))
        self.desk.plant(state, slots=tuple(slots))
        self.grants[line.id, state.number] = grant_of(replace(state, slots=tuple(slots)))
        yield from self._show(line.id, unchanged=False)

    def limits(self, line: Line) -> Iterator[str]:
        changes = {name: int(value) for name, value in line.options.items()}
        self.desk.limits = replace(self.desk.limits, **changes)
        yield from ()


def _init(story: Story, line: Line) -> Command:
    number = line.options.get("grant")
    return InitProducer(
        transactional_id=line.id,
        instance=line.options.get("by", "one"),
        address=line.options.get("by", "one") + ":1",
        transaction_timeout_ms=TIMEOUT_MS,
        grant=story.grants[line.id, int(number)] if number else None,
        without_waiting=line.flag("nowait"),
        keep_prepared=line.flag("keep"),
        slots_max=int(line.options.get("slots", "2")),
    )


def _end(story: Story, line: Line) -> Command:
    chain = [word for word in line.options.get("chain", "").split(",") if word]
    return End(
        transactional_id=line.id,
        grant=story.grant(line),
        result=Result.COMMITTED if line.flag("commit") else Result.ABORTED,
        contents=line.contents,
        decided_is_enough=line.flag("decided"),
        next_partitions=frozenset(map(partition_of, chain)),
        next_groups=line.groups,
    )


COMMANDS: dict[str, Callable[[Story, Line], Command]] = {
    # init a by=one [grant=1] [nowait] [keep] [slots=1]
    "init": _init,
    # add a p0 p1 [group=g] [begun=5s] [as=1]
    "add": lambda story, line: Register(
        transactional_id=line.id,
        grant=story.grant(line),
        partitions=line.partitions,
        groups=line.groups,
        begun_ms_ago=line.begun_ms_ago,
    ),
    # prepare a p0=0-3 [token=x] [as=1]
    "prepare": lambda story, line: Prepare(transactional_id=line.id, grant=story.grant(line), contents=line.contents),
    # end a commit|abort [p0=0-3,5] [offsets=g] [token=x] [chain=p0,p1] [group=g] [decided] [as=1]
    "end": _end,
    # heartbeat a [begun=5s] [extend] [as=1]
    "heartbeat": lambda story, line: Heartbeat(
        transactional_id=line.id,
        grant=story.grant(line),
        begun_ms_ago=line.begun_ms_ago,
        extend=line.flag("extend"),
    ),
    # outcome a 1
    "outcome": lambda _, line: GetOutcome(transactional_id=line.id, number=int(line.words[0])),
    # abort a 1: by an administrator
    "abort": lambda _, line: Abort(transactional_id=line.id, number=int(line.words[0])),
    # fence a [prepared]: by an administrator
    "fence": lambda _, line: ForceFence(
        transactional_id=line.id, administrator="root", abort_prepared=line.flag("prepared")
    ),
    # timeout a 1
    "timeout": lambda _, line: Timeout(transactional_id=line.id, number=int(line.words[0])),
    # complete a
    "complete": lambda _, line: Complete(transactional_id=line.id),
    # expire a idle=7d
    "expire": lambda story, line: Expire(
        transactional_id=line.id, idle_since_before_ms=story.desk.now_ms - duration_ms(line.options["idle"])
    ),
}
ACTS: dict[str, Callable[[Story, Line], Iterator[str]]] = {
    # pay a 1 [p0]: the manifest, and the markers of these partitions (none named: all)
    "pay": Story.pay,
    # drop a 1 [p0]: as above, but the markers are given up
    "drop": Story.drop,
    # recreate: the topic is deleted and created again
    "recreate": Story.recreate,
    # advance 5s
    "advance": Story.advance,
    # sweep: whatever has outlived its timeout
    "sweep": Story.sweep,
    # crash [compacted]: the next leader has the log and the feed, nothing else
    "crash": Story.crash,
    # plant a epoch=32766
    "plant": Story.plant,
    # limits debts_max=2
    "limits": Story.limits,
}


def rewrite(path: Path) -> str:
    """The story with what its commands really print."""
    story = Story()
    blocks = []
    for block in path.read_text().strip().split("\n\n"):
        asked, _, _ = block.partition("\n----")
        commands = [line for line in asked.splitlines() if line and not line.startswith("#")]
        printed = [line for command in commands for line in story.run(command)]
        blocks.append("\n".join([asked, "----", *printed]) if commands else asked)
    return "\n\n".join(blocks) + "\n"
