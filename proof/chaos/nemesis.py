"""Which fault comes when: a schedule that depends on the seed alone, never on what the run does.

Every kind comes before any comes twice. A round has one fault, or two of different parts at the same time; what hits
everything comes alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

DOUBLE_PROBABILITY = 0.3
CALM_MIN_S, CALM_MAX_S = 1.0, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    noun: str
    down_min_s: float
    down_max_s: float
    what: str
    # A host of its own, which only root can make (proof.faults.hosts).
    needs_host: bool = False


# What hits this is of all parts at once.
EVERYTHING = "everything"

FAULTS = {
    "kill-coordinator": Kind(noun="coordinator", down_min_s=0.5, down_max_s=4, what="SIGKILL, started again later"),
    "pause-coordinator": Kind(noun="coordinator", down_min_s=8, down_max_s=11, what="SIGSTOP beyond its session"),
    "cut-coordinator": Kind(noun="coordinator", down_min_s=1, down_max_s=6, what="connections reset, none accepted"),
    "delay-coordinator": Kind(
        noun="coordinator", down_min_s=4, down_max_s=8, what="all to and from it comes 0.3 s later"
    ),
    "mute-coordinator": Kind(noun="coordinator", down_min_s=4, down_max_s=8, what="it hears, and is not heard"),
    "roll-coordinators": Kind(noun="coordinator", down_min_s=0.5, down_max_s=2, what="SIGTERM, one after the other"),
    "kill-all-coordinators": Kind(noun="coordinator", down_min_s=0.5, down_max_s=3, what="all of them at once"),
    "jump-coordinator": Kind(
        noun="coordinator", down_min_s=1, down_max_s=4, what="its clock is minutes or hours off, and a client is gone"
    ),
    "kill-broker": Kind(noun="broker", down_min_s=0.5, down_max_s=5, what="SIGKILL, started again later"),
    "pause-broker": Kind(noun="broker", down_min_s=6, down_max_s=9, what="SIGSTOP beyond its session"),
    "cut-broker": Kind(noun="broker", down_min_s=1, down_max_s=6, what="connections reset, none accepted"),
    "delay-broker": Kind(noun="broker", down_min_s=4, down_max_s=8, what="all to and from it comes 0.3 s later"),
    "mute-broker": Kind(noun="broker", down_min_s=4, down_max_s=8, what="it hears and executes, and is not heard"),
    "fill-broker": Kind(noun="broker", down_min_s=2, down_max_s=6, what="no file grows any more: its disk is full"),
    "isolate-broker": Kind(
        noun="broker",
        down_min_s=6,
        down_max_s=12,
        what="nothing passes between it and the other brokers; clients reach it",
        needs_host=True,
    ),
    "deafen-broker": Kind(
        noun="broker",
        down_min_s=6,
        down_max_s=12,
        what="it hears nothing of the other brokers, and they hear it",
        needs_host=True,
    ),
    "roll-brokers": Kind(noun="broker", down_min_s=0.5, down_max_s=2, what="SIGTERM, one after the other"),
    # Nobody waits longer than 10 s for one of those that it befalls.
    "late-request": Kind(noun="request", down_min_s=12, down_max_s=15, what="held, and sent when nobody waits for it"),
    "repeat-request": Kind(noun="request", down_min_s=3, down_max_s=9, what="sent once more, seconds later"),
    "lost-reply": Kind(noun="request", down_min_s=1, down_max_s=3, what="a request is executed, its reply is lost"),
    "kill-relay": Kind(noun="relay", down_min_s=0.5, down_max_s=4, what="SIGKILL, started again later"),
    "pause-relay": Kind(noun="relay", down_min_s=5, down_max_s=8, what="SIGSTOP beyond its session"),
    "jump-relay": Kind(noun="relay", down_min_s=2, down_max_s=5, what="its clock is minutes or hours off"),
    "kill-outbox": Kind(noun="outbox", down_min_s=0.5, down_max_s=4, what="SIGKILL, started again later"),
    "pause-outbox": Kind(noun="outbox", down_min_s=5, down_max_s=8, what="SIGSTOP until the other one takes over"),
    "jump-outbox": Kind(noun="outbox", down_min_s=2, down_max_s=5, what="its clock is minutes or hours off"),
    "kill-copier": Kind(noun="copier", down_min_s=0.5, down_max_s=4, what="SIGKILL, started again later"),
    "pause-copier": Kind(noun="copier", down_min_s=8, down_max_s=12, what="SIGSTOP beyond its session"),
    "jump-copier": Kind(noun="copier", down_min_s=2, down_max_s=5, what="its clock is minutes or hours off"),
    "kill-postgres": Kind(noun="postgres", down_min_s=0.5, down_max_s=4, what="SIGKILL of all its processes"),
    "pause-postgres": Kind(noun="postgres", down_min_s=5, down_max_s=8, what="SIGSTOP of all its processes"),
    "cut-postgres": Kind(noun="postgres", down_min_s=1, down_max_s=4, what="connections reset, none accepted"),
    "delay-postgres": Kind(noun="postgres", down_min_s=4, down_max_s=8, what="all to and from it comes 0.3 s later"),
    "mute-postgres": Kind(noun="postgres", down_min_s=4, down_max_s=8, what="it hears and commits, and is not heard"),
    "fill-postgres": Kind(noun="postgres", down_min_s=2, down_max_s=5, what="no file grows any more: its disk is full"),
    "kill-client": Kind(noun="client", down_min_s=0, down_max_s=1, what="SIGKILL, another takes its transactional.id"),
    "pause-client": Kind(noun="client", down_min_s=8, down_max_s=10, what="SIGSTOP beyond its transaction's timeout"),
    "zombie-client": Kind(noun="client", down_min_s=3, down_max_s=5, what="SIGSTOP, replaced, and then it goes on"),
    "jump-client": Kind(noun="client", down_min_s=2, down_max_s=8, what="its clock is minutes or hours off"),
    "kill-everything": Kind(noun=EVERYTHING, down_min_s=1, down_max_s=3, what="SIGKILL of all parts at once"),
}


class UnknownFaultError(Exception):
    """The text lists those that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    fault: str
    # Which of the parts, modulo how many there are.
    pick: int
    down_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    calm_s: float
    steps: tuple[Step, ...]


def chosen(names: str) -> list[str]:
    """Of `--faults`: names of faults, or of parts or verbs for all that have them; nothing: all."""
    found: list[str] = []
    for name in filter(None, (each.strip() for each in names.split(","))):
        matching = [fault for fault in FAULTS if name in {fault, FAULTS[fault].noun, fault.partition("-")[0]}]
        if not matching:
            listed = "; ".join(f"{fault}: {kind.what}" for fault, kind in FAULTS.items())
            raise UnknownFaultError(f"no fault {name!r}; there are {listed}")
        found += [fault for fault in matching if fault not in found]
    return found or list(FAULTS)


def rounds(seed: int, faults: Sequence[str]) -> Iterator[Round]:
    """Without end."""
    random = Random(seed)
    deck: list[str] = []
    while True:
        if not deck:
            deck = random.sample(faults, len(faults))
        steps = [_step(random, deck.pop())]
        if deck and random.random() < DOUBLE_PROBABILITY and _fit(steps[0].fault, deck[-1]):
            steps.append(_step(random, deck.pop()))
        yield Round(calm_s=random.uniform(CALM_MIN_S, CALM_MAX_S), steps=tuple(steps))


def _fit(one: str, other: str) -> bool:
    nouns = {FAULTS[one].noun, FAULTS[other].noun}
    return len(nouns) == 2 and EVERYTHING not in nouns


def _step(random: Random, fault: str) -> Step:
    kind = FAULTS[fault]
    return Step(fault=fault, pick=random.randrange(1_000), down_s=random.uniform(kind.down_min_s, kind.down_max_s))
