"""Who may do what: grants are given once, the stale are refused, refusals have a reason, answers are never outdated."""

from collections.abc import Iterator

from proof.checker.history import Expired, Fed, Grant, Kind, Logged, Marked, Result
from proof.checker.index import Index, Told, Transaction, named


def stale_owner(index: Index) -> Iterator[str]:
    """Someone who had been replaced still got something through: an owner, or a leader of the log."""
    for partition, events in index.standing.items():
        epochs: dict[int, int] = {}
        for _, event in events:
            if isinstance(event, Marked):
                epochs[event.producer_id] = max(event.epoch, epochs.get(event.producer_id, -1))
            elif event.epoch < epochs.get(event.producer_id, -1):
                yield f"{event.values} of epoch {event.epoch} was taken at {partition} after a marker of a higher epoch"
    yield from _stale_leaders(index)
    yield from _stale_claims(index)


def _stale_leaders(index: Index) -> Iterator[str]:
    newest: dict[tuple[type, int], int] = {}
    for event in index.events:
        if isinstance(event, Logged | Expired | Fed):
            key = (Fed, event.feed_partition) if isinstance(event, Fed) else (Logged, event.log_partition)
            if event.leader_epoch < newest.get(key, 0):
                yield f"a leader of epoch {event.leader_epoch} wrote {event} after one of epoch {newest[key]}"
            newest[key] = event.leader_epoch


def _stale_claims(index: Index) -> Iterator[str]:
    """InitProducer with a grant is for the owner: nobody else may have been granted one without, since."""
    owners: dict[str, list[tuple[int, Told]]] = {}
    for told in index.told:
        if told.call.kind is not Kind.INIT or told.answer.grant is None:
            continue
        if told.call.number:
            for answered_at, other in owners.get(told.call.transactional_id, ()):
                newer = other.answer.grant is not None and other.answer.grant.number > told.call.number
                if newer and answered_at < told.called_at and other.call.client != told.call.client:
                    yield (
                        f"{told.call.client} claimed {named((told.call.transactional_id, told.call.number))} and was "
                        f"granted {told.answer.grant}, although {other.call.client} owned the id since then"
                    )
        else:
            owners.setdefault(told.call.transactional_id, []).append((told.answered_at, told))


def number_reused(index: Index) -> Iterator[str]:
    """One number with two grants, one (producer id, epoch) with two numbers, or one grant for two owners."""
    grants: dict[Transaction, Grant] = {}
    numbers: dict[tuple[int, int], Transaction] = {}
    for name, grant in _all_grants(index):
        transaction = (name, grant.number)
        if grants.setdefault(transaction, grant) != grant:
            yield f"{named(transaction)} was granted as {grants[transaction]} and as {grant}"
        producer = (grant.producer_id, grant.epoch)
        if numbers.setdefault(producer, transaction) != transaction:
            yield f"{named(transaction)} and {named(numbers[producer])} share producer id and epoch {producer}"
    holders: dict[Transaction, str] = {}
    for told in index.told:
        granted = told.answer.grant
        if told.call.kind is Kind.INIT and granted is not None and not told.answer.prepared:
            transaction = (told.call.transactional_id, granted.number)
            if holders.setdefault(transaction, told.call.client) != told.call.client:
                yield f"{named(transaction)} was granted to {holders[transaction]} and to {told.call.client}"


def _all_grants(index: Index) -> Iterator[tuple[str, Grant]]:
    for event in index.events:
        if isinstance(event, Logged):
            yield event.transactional_id, event.grant
            for decided in event.decided:
                yield event.transactional_id, decided.grant
    for told in index.told:
        if told.answer.grant is not None:
            yield told.call.transactional_id, told.answer.grant


def fenced_without_cause(index: Index) -> Iterator[str]:
    """PRODUCER_FENCED although the id had no newer owner."""
    for told in index.told:
        if told.answer.error == "PRODUCER_FENCED" and told.call.number:
            newer = any(
                isinstance(event, Logged) and event.owner_since_number > told.call.number and at < told.answered_at
                for at, event in index.logged.get(told.call.transactional_id, ())
            )
            if not newer:
                transaction = (told.call.transactional_id, told.call.number)
                yield f"{told.call.client} was fenced at {named(transaction)}, and nobody had taken the id"


def stale_answer(index: Index) -> Iterator[str]:
    """An answer that contradicts what another answer had told before the question was asked."""
    decided: dict[Transaction, int] = {}
    granted: dict[Transaction, int] = {}
    for told in index.told:
        name = told.call.transactional_id
        if told.answer.decided is not None:
            decided.setdefault((name, told.answer.decided.grant.number), told.answered_at)
        if told.answer.grant is not None:
            granted.setdefault((name, told.answer.grant.number), told.answered_at)
    for told in index.told:
        call, answer = told.call, told.answer
        transaction = (call.transactional_id, call.number)
        is_open = answer.undecided or (
            call.kind is Kind.REGISTER and answer.grant is not None and answer.grant.number == call.number
        )
        if is_open and decided.get(transaction, told.called_at) < told.called_at:
            yield f"{call.client} was told that {named(transaction)} is open, after somebody was told its outcome"
        # Of a number that the answerer has not heard of.
        is_unheard = call.kind is Kind.OUTCOME and answer.error == "INVALID_REQUEST"
        if is_unheard and granted.get(transaction, told.called_at) < told.called_at:
            yield f"{call.client} was told that {named(transaction)} does not exist, after somebody was granted it"


def resume_token_back(index: Index) -> Iterator[str]:
    """A resume token that is older than that of a commit known before."""
    for name, events in index.logged.items():
        newest = -1
        for _, event in events:
            token = int((event.resume_token if isinstance(event, Logged) else b"") or b"0")
            if isinstance(event, Logged) and token < newest:
                yield f"the resume token of {name} fell from {newest} to {token}"
            newest = token
    for told in index.told:
        if told.call.kind is Kind.INIT and told.answer.resume_token is not None:
            token = int(told.answer.resume_token or b"0")
            before = [
                event
                for at, event in index.logged.get(told.call.transactional_id, ())
                if at < told.called_at and isinstance(event, Logged)
            ]
            if before and token < int(before[-1].resume_token or b"0"):
                yield f"{told.call.client} was told to resume at {token}, committed was {before[-1].resume_token!r}"


def absent_after_replay(index: Index) -> Iterator[str]:
    """Something was acknowledged that the log does not hold, or has forgotten."""
    durable: dict[Transaction, int] = {}
    for at, event in enumerate(index.events):
        if isinstance(event, Logged):
            durable.setdefault((event.transactional_id, event.grant.number), at)
    for told in index.told:
        name, decided, grant = told.call.transactional_id, told.answer.decided, told.answer.grant
        if decided is not None and index.decided_at((name, decided.grant.number)) > told.answered_at:
            yield f"{told.call.client} was told {decided} of {name}; the log does not say so"
        if grant is not None and durable.get((name, grant.number), len(index.events)) > told.answered_at:
            yield f"{told.call.client} was granted {name}/{grant.number}; the log does not say so"
    for name, events in index.logged.items():
        yield from _forgotten(name, events)


def _forgotten(name: str, events: list[tuple[int, Logged | Expired]]) -> Iterator[str]:
    """Each record holds all that the one before it held, but for the oldest outcomes."""
    known: set[tuple[int, Result]] = set()
    for _, event in events:
        if isinstance(event, Expired):
            known = set()
            continue
        now = {(decided.grant.number, decided.result) for decided in event.decided}
        oldest = min((number for number, _ in now), default=0)
        for number, result in known - now:
            if number >= oldest:
                yield f"the log forgot that {name}/{number} is {result.value}"
        known = now
