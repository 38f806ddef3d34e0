"""How the run went: everything came to its end, nothing stopped by itself, and memory and log agree."""

from collections.abc import Iterator

from proof.checker.history import Broken, Replayed, Stuck
from proof.checker.index import Index


def stuck(index: Index) -> Iterator[str]:
    """Not done in its time, although everything had healed."""
    for event in index.events:
        if isinstance(event, Stuck) and not event.by_stranger:
            yield event.what


def blocked_by_stranger(index: Index) -> Iterator[str]:
    """Not done in its time because of a partition that it has nothing to do with."""
    for event in index.events:
        if isinstance(event, Stuck) and event.by_stranger:
            yield event.what


def broken(index: Index) -> Iterator[str]:
    """An invariant broke, an exception that nobody expected, a refusal that a well-behaved client never gets."""
    for event in index.events:
        if isinstance(event, Broken):
            yield f"{event.where}: {event.error}"


def memory_is_not_the_log(index: Index) -> Iterator[str]:
    """fold(log) is not what the leader has in memory."""
    for event in index.events:
        if isinstance(event, Replayed):
            yield f"{event.transactional_id}: {event.differs}"
