"""The resume token: how far the outbox is published. It is committed with the records it speaks of, and comes back from
the coordinator at the next start. Also whether a database is the one that a token speaks of. Pure.
"""

import json
from dataclasses import dataclass

from relay.outbox.lsn import lsn_text

VERSION = 1


class StopError(Exception):
    """The relay cannot go on without a decision of a person. Nothing was lost or repeated so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    system_identifier: str
    timeline: int
    # The slot; in the fallback "commit_seq".
    source: str
    # The newest published commit LSN, or commit_seq; all up to it are published.
    position: int
    # Where that commit's record ends: the slot may stand there.
    end: int
    # Of the owner that published it. A database with a lower one is an older copy.
    fence: int
    # The last retry of parked rows that is published.
    retried: str = ""
    # Its oid. Empty: written before tokens had it.
    database: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the database says of itself at the start of a relay, after its fence was raised."""

    system_identifier: str
    timeline: int
    source: str
    fence: int
    # What the relay had last noted in the database.
    noted_source: str
    noted_system_identifier: str
    noted_timeline: int
    noted_published: int
    # Its oid: several of one server may have a relay of the same name.
    database: str
    # Up to here there was nothing to publish beyond the token. (Idle relays move their slot too.)
    idle: int
    # How far the database has written; the highest commit_seq given.
    newest: int
    # Where the slot stands; None in the fallback, which has none.
    confirmed: int | None


def encode(token: Token) -> bytes:
    return json.dumps(
        {
            "outbox": VERSION,
            "system": token.system_identifier,
            "timeline": token.timeline,
            "source": token.source,
            "position": token.position,
            "end": token.end,
            "fence": token.fence,
            "retried": token.retried,
            "database": token.database,
        },
        separators=(",", ":"),
    ).encode()


def decode(data: bytes) -> Token | None:
    """None: nothing was published yet."""
    if not data:
        return None
    try:
        given = json.loads(data)
        if given["outbox"] != VERSION:
            raise StopError(f"the resume token has version {given['outbox']}; this relay knows {VERSION}: update it")
        return Token(
            system_identifier=str(given["system"]),
            timeline=int(given["timeline"]),
            source=str(given["source"]),
            position=int(given["position"]),
            end=int(given["end"]),
            fence=int(given["fence"]),
            retried=str(given.get("retried", "")),
            database=str(given.get("database", "")),
        )
    except (ValueError, KeyError, TypeError):
        raise StopError(
            "the transactional id has a resume token that is not an outbox relay's: give this relay an id of its own"
        ) from None


COMMIT_SEQ = "commit_seq"
# Noted as the source from the beginning of a resync to its end.
RESYNC_BEGUN = "a resync was begun"
# Noted as the source where a running relay found its slot moved by somebody else; also until a resync is at its end.
SLOT_TAKEN = "the slot was moved by somebody else"
RESYNC = "compare what is published with the table: oncebox outbox resync"


def check(token: Token | None, facts: Facts) -> None:
    """Raises StopError where this database is not, or no longer, the one that was published from."""
    if facts.noted_source == RESYNC_BEGUN:
        raise StopError("a resync was begun and has not come to its end: oncebox outbox resync --apply")
    if facts.noted_source == SLOT_TAKEN:
        raise StopError(
            f"somebody else has read from the slot or made it anew while a relay was running, and changes are lost to "
            f"it; {RESYNC}"
        )
    if facts.noted_source != facts.source:
        raise StopError(
            f"this outbox was set up to be read from {facts.noted_source!r}, this relay reads {facts.source!r}: put "
            f"the setting back, give the relay a name of its own and run oncebox outbox init, or {RESYNC}"
        )
    if (facts.system_identifier, facts.timeline) != (facts.noted_system_identifier, facts.noted_timeline):
        raise StopError(_elsewhere(facts, facts.noted_system_identifier, facts.noted_timeline, "init"))
    published = idle_to = facts.idle
    if token is None and facts.noted_published:
        raise StopError(
            f"{_position(facts.source, facts.noted_published)} is published from here, but these coordinators know of "
            f"no commit of this relay (others than before, or their log was lost): put the setting back, or {RESYNC}"
        )
    if token is not None:
        if (token.system_identifier, token.timeline) != (facts.system_identifier, facts.timeline):
            raise StopError(_elsewhere(facts, token.system_identifier, token.timeline, "the last commit"))
        if token.database and token.database != facts.database:
            raise StopError(
                f"this is another database of the server (oid {facts.database}) than at the last commit "
                f"({token.database}): give the relay of each a name of its own, or {RESYNC}"
            )
        if token.source != facts.source:
            raise StopError(
                f"the last commit was read from {token.source!r}, this relay reads {facts.source!r}: put the setting "
                f"back, or {RESYNC}"
            )
        if token.fence >= facts.fence or token.position > facts.newest:
            raise StopError(
                f"the database is an older copy of itself: {_position(token.source, token.position)} is published "
                f"already, but it has only come to {_position(facts.source, facts.newest)} (restored?); {RESYNC}"
            )
        published = max(token.end, idle_to)
    if facts.confirmed is not None and facts.confirmed > published:
        raise StopError(slot_beyond(facts.source, facts.confirmed, published))


def slot_beyond(slot: str, confirmed: int, published: int) -> str:
    return (
        f"the slot {slot} stands at {lsn_text(confirmed)}, beyond all that this relay has published "
        f"({lsn_text(published)}): somebody else has read from it or made it anew, and changes between are lost to "
        f"it; {RESYNC}"
    )


def _elsewhere(facts: Facts, system_identifier: str, timeline: int, when: str) -> str:
    if system_identifier != facts.system_identifier:
        return (
            f"this is another database cluster (system identifier {facts.system_identifier}) than at {when} "
            f"({system_identifier}); {RESYNC}"
        )
    return (
        f"the database is on timeline {facts.timeline}, at {when} it was on {timeline}: it was restored or failed "
        f"over, and may have lost or kept other transactions than were published; {RESYNC}"
    )


def _position(source: str, position: int) -> str:
    return f"commit_seq {position}" if source == COMMIT_SEQ else lsn_text(position)
