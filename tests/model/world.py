"""A small world: clients, a network that loses, doubles and delays, a broker, and the core in between.

Whatever is done to it (moves.py), `check` says after every step what must hold: the core's answers are those the naive
ledger expects; the state is the fold of the log, also of the compacted one; no invariant is broken; nothing is visible
that is not committed. `heal` ends and pays everything: then all that was committed is visible, once, nothing is open.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.core.commands import (
    Abort,
    Accepted,
    Blocked,
    Command,
    Complete,
    Decision,
    End,
    Ended,
    ErrorCode,
    GetOutcome,
    Granted,
    InitProducer,
    OutcomeForgotten,
    OutcomeKnown,
    Prepare,
    Refused,
    Register,
    Reply,
    Timeout,
    Undecided,
    Wait,
)
from coordinator.core.grants import Limits
from coordinator.core.invariants import check
from coordinator.core.owed import Debt
from coordinator.core.records import Grant, Result, TopicPartition, grant_of, newest_transaction
from coordinator.core.state import TransactionState
from tests.model.broker import Broker, Marker
from tests.model.clients import Client, Produce, deliver
from tests.model.desk import Desk, compacted, fold
from tests.model.ledger import Ledger, verdict

IDS = ("a", "b")
TOPIC = "t"
# Small, so that they are met.
LIMITS = Limits(outcomes_kept=3, debts_max=4, patience_ms=1_000)


@dataclass(slots=True)
class Message:
    client: str
    request: int
    command: Command


@dataclass(slots=True)
class Parked:
    """A reply that waits until debts are paid."""

    message: Message
    reply: Reply
    wait: Wait


class World:
    def __init__(self, *, epoch: int, slots_max: int) -> None:
        """Each id has an owner; `a` may have lived for so long that its epochs are about to be used up."""
        self.desk = Desk(limits=LIMITS)
        self.broker = Broker()
        self.ledger = Ledger(outcomes_kept=LIMITS.outcomes_kept)
        self.clients = {name: Client(transactional_id="a", name=name) for name in ("one", "two", "three")}
        self.clients["four"] = Client(transactional_id="b", name="four")
        self.requests = 0
        self.late_messages: list[Message] = []
        self.late_produces: list[Produce] = []
        # Each of them may come again at any time.
        self.markers: list[Marker] = []
        self.parked: list[Parked] = []
        # How often the topic was deleted and created again, also: before a producer id was first granted, and as far as
        # a transaction that is about to be committed knew.
        self.recreations = 0
        self.known_since: dict[int, int] = {}
        self.noticed_before: dict[int, int] = {}
        self.written_in: dict[tuple[str, int], int] = {}
        # Numbers of which a marker was given up: what they wrote may hang.
        self.dropped: set[tuple[str, int]] = set()
        # What commits said they hold.
        self.claimed: dict[tuple[str, int], set[tuple[TopicPartition, int]]] = {}
        self.wrote_in: dict[tuple[str, int], set[int]] = {}
        for client in (self.clients["one"], self.clients["four"]):
            self._first_owner(client, epoch if client.name == "one" else 0, slots_max)

    def _first_owner(self, client: Client, epoch: int, slots_max: int) -> None:
        command = client.init(claim=False, without_waiting=False, keep_prepared=False, slots_max=slots_max)
        self.desk.call(command)
        state = self.desk.state.active[client.transactional_id]
        state = replace(state, slots=(replace(state.slots[0], epoch=epoch),))
        self.desk.plant(state)
        self._know(grant_of(state))
        reply = Granted(grant=grant_of(state), resume_token=b"")
        self.ledger.follow(command, Accepted(reply=reply), grant_of(state))
        client.hear(command, reply)

    # --- the network ------------------------------------------------------------------------------------------------

    def send(self, client: Client, command: Command | None, fate: str) -> None:
        """`fate`: it arrives now, its answer is lost (unanswered), it comes later, twice, or its append fails."""
        if command is None:
            return
        self.requests += 1
        client.request = self.requests
        message = Message(client.name, self.requests, command)
        if isinstance(command, End) and command.result is Result.COMMITTED and client.prepared is None:
            written = {(p, offset) for p, offsets in client.acknowledged.items() for offset in offsets}
            self.claimed[client.transactional_id, command.grant.number] = written
            self.wrote_in[client.transactional_id, command.grant.number] = set(client.incarnations)
        if fate in ("later", "twice"):
            self.late_messages.append(message)
        if fate == "append fails":
            # Decided, but the record never came to stand in the log: as if the call had not been made (R11).
            command = self._told(command)
            self._check_decision(command, self.desk.ask(command))
        elif fate != "later":
            self.deliver(message, answered=fate != "unanswered")

    def deliver(self, message: Message, *, answered: bool = True) -> None:
        decision = self.decide(message.command)
        if not answered:
            return
        match decision:
            case Refused():
                self._answer(message, decision)
            case Blocked():
                self._answer(message, decision.refusal)
            case Accepted(wait=Wait.NOTHING):
                self._answer(message, decision.reply)
            case Accepted():
                self.parked.append(Parked(message, decision.reply, decision.wait))
                self.answer_parked()

    def _answer(self, message: Message, answer: Reply | Refused) -> None:
        client = self.clients[message.client]
        if client.request == message.request:
            client.request = 0
            client.hear(message.command, answer)

    def answer_parked(self) -> None:
        waiting = []
        for parked in self.parked:
            unpaid = self.desk.unpaid(parked.message.command.transactional_id)
            reply = parked.reply
            if isinstance(reply, Granted):
                held = any(number < reply.grant.number for number in unpaid)
            else:
                held = isinstance(reply, Ended) and reply.outcome.grant.number in unpaid
            if held:
                waiting.append(parked)
            else:
                self._answer(parked.message, reply)
        self.parked = waiting

    def stop_waiting(self, parked: Parked) -> None:
        """End waits for its markers only so long, then answers that it is decided."""
        if parked.wait is Wait.ENDED_IS_PAID:
            self.parked.remove(parked)
            self._answer(parked.message, parked.reply)

    def is_waiting(self, client: Client) -> bool:
        return any(parked.message.request == client.request for parked in self.parked)

    def write(self, client: Client, partition: TopicPartition, *, late: bool) -> None:
        produce = client.write(partition)
        if late:
            # No answer: the client can only abort. The batch itself may still arrive, at any time.
            client.must_abort = True
            self.late_produces.append(produce)
        else:
            client.hear_broker(produce, deliver(self.broker, produce))
            if partition.topic == TOPIC:
                client.incarnations.add(self.recreations)

    def recreate(self) -> None:
        """Markers that are under way do not reach the new topic, all else does."""
        self.recreations += 1
        self.broker.recreate(TOPIC)
        self.markers = [marker for marker in self.markers if marker.partition.topic != TOPIC]

    def _told(self, command: Command) -> Command:
        """The API adds which topic the name stands for when the call arrives."""
        if isinstance(command, Register | Prepare | End):
            return replace(command, topic_ids={TOPIC: b"%d" % self.recreations})
        return command

    # --- the coordinator --------------------------------------------------------------------------------------------

    def decide(self, command: Command) -> Decision:
        command = self._told(command)
        decision = self.desk.ask(command)
        self._check_decision(command, decision)
        if isinstance(decision, Accepted):
            self.desk.append(decision)
            state = self.desk.state.get(command.transactional_id)
            if state is not None:
                self._know(grant_of(state))
            if isinstance(command, Prepare | End):
                self.written_in.setdefault((command.transactional_id, command.grant.number), self.recreations)
            self.ledger.follow(command, decision, grant_of(state) if state else None)
            self._check_reply(command, decision.reply)
        return decision

    def crash(self, *, compact: bool) -> None:
        """The next leader has the log and the feed; calls under way and progress with markers are forgotten."""
        self.desk.crash(compact=compact)
        self.parked.clear()

    def debts(self) -> list[tuple[Debt, TopicPartition | None]]:
        """Each marker (None: nothing but the manifest) that is owed, in a stable order."""
        found: list[tuple[Debt, TopicPartition | None]] = []
        for tid in IDS:
            unpaid = self.desk.unpaid(tid)
            for debt in self.desk.owed(tid):
                if debt.number in unpaid:
                    found.extend((debt, partition) for partition in sorted(unpaid[debt.number]) or (None,))
        return found

    def pay(self, debt: Debt, partition: TopicPartition | None, fate: str) -> None:
        self.desk.write_manifest(debt)
        if partition is not None:
            # In a topic created since there is nothing of it to commit.
            is_gone = partition.topic == TOPIC and self.is_gone((debt.transactional_id, debt.number))
            where = (debt.producer_id, debt.marker_epoch, debt.commit and not is_gone, partition)
            marker = Marker(debt.transactional_id, debt.number, *where)
            self.markers.append(marker)
            if fate != "later":
                self.broker.mark(marker)
            if fate == "now":
                # Refused with 47 is as good: somebody newer has done it.
                self.desk.acknowledge(debt, partition)
        self.answer_parked()

    def is_gone(self, number: tuple[str, int]) -> bool:
        return self.written_in.get(number, self.recreations) != self.recreations

    def drop(self, debt: Debt, partition: TopicPartition | None) -> None:
        """Though brokers say so, the partition is not gone."""
        self.desk.write_manifest(debt)
        if partition is not None:
            self.desk.drop(debt, partition)
            self.dropped.add((debt.transactional_id, debt.number))
        self.answer_parked()

    def pay_all(self) -> None:
        for debt, partition in self.debts():
            self.pay(debt, partition, "now")

    def repeat_markers(self) -> None:
        for marker in self.markers:
            self.broker.mark(marker)

    # --- what must hold ---------------------------------------------------------------------------------------------

    def _check_decision(self, command: Command, decision: Decision) -> None:
        unpaid = self.desk.unpaid(command.transactional_id)
        expected = self.ledger.expect(command, frozenset(unpaid))
        if isinstance(decision, Refused) and decision.code is ErrorCode.TRANSACTION_ABORTABLE:
            assert isinstance(command, Register | Prepare | End)
            # A change may be noticed long after it happened: then it counts for producer ids of the time between, too.
            known = self.desk.state.topics[TOPIC]
            noticed = self.desk.state.topic_changes > self.noticed_before[command.grant.producer_id]
            noticed = noticed or known.topic_id != command.topic_ids[TOPIC]
            assert noticed or self.is_older(command.grant), f"{command} is refused, the topic has not changed"
            return
        assert verdict(decision) is expected, f"{command}\nexpected {expected!r}, got {decision}"
        if isinstance(decision, Blocked):
            assert unpaid, f"{command} is held back though nothing is owed"
            assert isinstance(command, Register) or len(unpaid) >= LIMITS.debts_max, f"{command} is held back"
            assert decision.again_at_ms > self.desk.now_ms

    def _know(self, grant: Grant) -> None:
        self.known_since.setdefault(grant.producer_id, self.recreations)
        self.noticed_before.setdefault(grant.producer_id, self.desk.state.topic_changes)

    def is_older(self, grant: Grant) -> bool:
        """Than the topic of today."""
        return self.known_since[grant.producer_id] < self.recreations

    def _check_reply(self, command: Command, reply: Reply) -> None:
        book = self.ledger.books.get(command.transactional_id)
        if book is None:
            return
        match reply:
            case Granted():
                assert reply.resume_token == book.token
                assert reply.grant == book.grants[book.number]
                if isinstance(command, InitProducer) and command.grant and reply.outcome:
                    assert book.results[command.grant.number][0] is reply.outcome.result
            case Ended() | OutcomeKnown():
                outcome = reply.outcome
                assert book.results.get(outcome.grant.number) == (outcome.result, outcome.cause)
                if isinstance(command, End) and isinstance(reply, Ended):
                    owned = command.grant.number >= book.number_first
                    assert reply.next_grant == (book.grants[book.number] if owned else None)
            case Undecided():
                assert isinstance(command, GetOutcome)
                assert command.number not in book.results
            case OutcomeForgotten():
                unpaid = frozenset(self.desk.unpaid(command.transactional_id))
                assert not self.ledger.remembers(book, reply.number, unpaid)

    def check(self) -> None:
        """After every step."""
        self._check_fold()
        self._check_books()
        self._check_visible()

    def _check_fold(self) -> None:
        live = self.desk.state
        for records in (self.desk.log, compacted(self.desk.log)):
            folded = fold(records)
            assert folded.active == live.active
            assert folded.number_floor == live.number_floor
        for state in live:
            check(state)

    def _check_books(self) -> None:
        assert set(self.ledger.books) == set(self.desk.state.active)
        for tid, book in self.ledger.books.items():
            state = self.desk.state.active[tid]
            newest = newest_transaction(state)
            registered = newest.partitions | newest.groups if newest else frozenset()
            assert (state.number, registered) == (book.number, book.registered)
            assert (newest is not None and newest.state is TransactionState.PREPARED) == (book.prepared is not None)
            assert (state.owner.instance, state.owner.number_first) == (book.instance, book.number_first)
            assert state.resume_token == book.token
            assert len(self.desk.owed(tid)) <= LIMITS.debts_max

    def _check_visible(self) -> None:
        for value in self.broker.visible_values():
            result, _ = self.ledger.decided.get((value.transactional_id, value.number), (None, None))
            assert result is Result.COMMITTED, f"{value} is visible, its transaction {result}"

    def heal(self) -> None:
        """What is open is ended, what is owed is paid; and then come the latecomers."""
        for tid in IDS:
            if tid in self.desk.state.active:
                self.decide(Timeout(transactional_id=tid, number=self.desk.state.active[tid].number))
                newest = newest_transaction(self.desk.state.active[tid])
                if newest is not None:
                    self.decide(Abort(transactional_id=tid, number=newest.grant.number))
        self.pay_all()
        for tid in IDS:
            self.decide(Complete(transactional_id=tid))
            assert not self.desk.owed(tid)
        for produce in self.late_produces:
            number = (produce.value.transactional_id, produce.value.number)
            # A topic created since, or a marker given up: left to the search for hanging transactions.
            if number not in self.dropped and not self.is_older(produce.grant):
                assert deliver(self.broker, produce) is None, f"{produce} came after its transaction's end"
        self.repeat_markers()
        for value in self.broker.open_values():
            number = (value.transactional_id, value.number)
            grant = self.ledger.handed_out[number]
            assert number in self.dropped or self.is_older(grant), f"{value} is left hanging"
        self.check()
        self._check_all_is_visible()

    def _check_all_is_visible(self) -> None:
        visible: dict[tuple[str, int], list[tuple[TopicPartition, int]]] = {}
        for partition, values in self.broker.visible.items():
            for offset, value in values:
                visible.setdefault((value.transactional_id, value.number), []).append((partition, offset))
        for number, written in self.claimed.items():
            result, _ = self.ledger.decided.get(number, (None, None))
            if result is Result.COMMITTED:
                assert self.wrote_in[number] <= {self.written_in[number]}, f"{number} wrote to a topic that was gone"
            if result is Result.COMMITTED and number not in self.dropped and not self.is_gone(number):
                assert sorted(visible.get(number, [])) == sorted(written), f"{number} is not wholly visible"
        committed = {number for number, (result, _) in self.ledger.decided.items() if result is Result.COMMITTED}
        assert sorted(self.desk.feed) == sorted(committed)
