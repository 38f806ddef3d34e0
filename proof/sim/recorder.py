"""Writes the history of a run: turns what the parts do into events that the checker understands."""

from coordinator.calls import Answer
from coordinator.core import commands
from coordinator.core import records as core
from coordinator.log import codec
from coordinator.log.lead import EPOCHS_PER_GENERATION, PRODUCER_ID_BASE
from oncebox.v1 import manifest_pb2
from oncebox.wire import TopicPartition
from proof.checker import history as h
from proof.sim.partition import Batch, Partition

LOG_TOPIC = "oncebox.log"
FEED_TOPIC = "oncebox.commits"

_RESULTS = {
    core.Result.UNDECIDED: h.Result.UNDECIDED,
    core.Result.COMMITTED: h.Result.COMMITTED,
    core.Result.ABORTED: h.Result.ABORTED,
}
_KINDS: dict[type, h.Kind] = {
    commands.InitProducer: h.Kind.INIT,
    commands.Register: h.Kind.REGISTER,
    commands.Prepare: h.Kind.PREPARE,
    commands.End: h.Kind.END,
    commands.GetOutcome: h.Kind.OUTCOME,
    commands.ForceFence: h.Kind.FENCE,
    commands.Abort: h.Kind.ABORT,
}


class Recorder:
    def __init__(self) -> None:
        self.history: h.History = []
        # Those for which it was asked, by transactional id and number.
        self.prepared: set[tuple[str, int]] = set()
        self._calls = 0

    # --- clients ------------------------------------------------------------------------------------------------

    def called(self, client: str, command: commands.Command) -> int:
        """Heartbeats promise nothing and are not recorded."""
        kind = _KINDS.get(type(command))
        if kind is None:
            return 0
        self._calls += 1
        given = getattr(command, "grant", None)
        if isinstance(command, commands.Prepare):
            self.prepared.add((command.transactional_id, command.grant.number))
        self.history.append(
            h.Called(
                call=self._calls,
                client=client,
                kind=kind,
                transactional_id=command.transactional_id,
                number=given.number if given else getattr(command, "number", 0),
            )
        )
        return self._calls

    def answered(self, call: int, answer: Answer | commands.Refused) -> None:
        if call:
            self.history.append(_answered(call, answer))

    def acknowledged(
        self, client: str, transactional_id: str, grant: core.Grant, partition: str, offset: int, value: str
    ) -> None:
        self.history.append(
            h.Acknowledged(
                client=client,
                transactional_id=transactional_id,
                grant=_grant(grant),
                partition=partition,
                offset=offset,
                value=value,
            )
        )

    # --- brokers ------------------------------------------------------------------------------------------------

    def stored(self, partition: Partition, batch: Batch) -> None:
        if batch.transactional:
            self.history.append(
                h.Stored(
                    partition=partition.name,
                    offset=batch.offset,
                    producer_id=batch.producer_id,
                    epoch=batch.epoch,
                    values=tuple(batch.records),
                    stray=batch.stray,
                )
            )

    def marked(self, partition: Partition, batch: Batch, *, hanging: bool = False) -> None:
        self.history.append(
            h.Marked(
                partition=partition.name,
                offset=batch.offset,
                producer_id=batch.producer_id,
                epoch=batch.epoch,
                commit=bool(batch.commit),
                hanging=hanging,
            )
        )

    def lost(self, partition: Partition) -> None:
        self.history.append(h.Lost(partition=partition.name, offset_next=partition.offset_next))

    def deleted(self, partition: Partition) -> None:
        self.history.append(h.Deleted(partition=partition.name))

    def durable(self, where: TopicPartition, batch: Batch) -> None:
        if where.topic == LOG_TOPIC:
            leader_epoch = _leader_epoch(batch)
            for offset, (key, value) in enumerate(batch.records, batch.offset):
                self._logged(where.partition, offset, leader_epoch, key, value)
        elif where.topic == FEED_TOPIC:
            leader_epoch = _leader_epoch(batch)
            for offset, (_, value) in enumerate(batch.records, batch.offset):
                record = codec.parse_feed(value)
                if record.WhichOneof("record") == "manifest":
                    self.history.append(_fed(where.partition, offset, leader_epoch, record.manifest))

    def _logged(self, log_partition: int, offset: int, leader_epoch: int, key: bytes, value: bytes | None) -> None:
        parsed = codec.parse_key(key)
        if parsed.WhichOneof("key") != "transactional_id":
            return
        transactional_id = parsed.transactional_id
        if value is None:
            self.history.append(
                h.Expired(
                    log_partition=log_partition,
                    offset=offset,
                    leader_epoch=leader_epoch,
                    transactional_id=transactional_id,
                )
            )
            return
        state = codec.decode_id(transactional_id, value)
        self.history.append(
            h.Logged(
                log_partition=log_partition,
                offset=offset,
                leader_epoch=leader_epoch,
                transactional_id=transactional_id,
                grant=_grant(core.grant_of(state)),
                owner_since_number=state.owner.number_first,
                decided=tuple(h.Decided(_grant(outcome.grant), _RESULTS[outcome.result]) for outcome in state.outcomes),
                resume_token=state.resume_token,
            )
        )


def _leader_epoch(batch: Batch) -> int:
    generation = (batch.producer_id - PRODUCER_ID_BASE) >> 20
    return generation * EPOCHS_PER_GENERATION + batch.epoch


def _fed(partition: int, offset: int, leader_epoch: int, manifest: manifest_pb2.Manifest) -> h.Fed:
    return h.Fed(
        feed_partition=partition,
        offset=offset,
        leader_epoch=leader_epoch,
        transactional_id=manifest.transactional_id,
        grant=h.Grant(manifest.number, manifest.producer_id, manifest.epoch),
        part=manifest.part,
        part_count=manifest.part_count,
        runs=tuple(
            h.Run(
                f"{written.topic}-{written.partition}@{int.from_bytes(written.topic_id)}",
                run.offset_first,
                run.offset_next,
            )
            for written in manifest.written
            for run in written.runs
        ),
    )


def _grant(grant: core.Grant) -> h.Grant:
    return h.Grant(grant.number, grant.producer_id, grant.epoch)


def _decided(outcome: core.Outcome | None) -> h.Decided | None:
    return h.Decided(_grant(outcome.grant), _RESULTS[outcome.result]) if outcome else None


def _answered(call: int, answer: Answer | commands.Refused) -> h.Answered:
    if isinstance(answer, commands.Refused):
        return h.Answered(call=call, error=answer.code.name, decided=_decided(answer.outcome))
    match answer.reply:
        case commands.Granted() as reply:
            return h.Answered(
                call=call,
                grant=_grant(reply.grant),
                decided=_decided(reply.outcome),
                prepared=reply.prepared is not None,
                resume_token=reply.resume_token,
            )
        case commands.Registered(grant=grant):
            return h.Answered(call=call, grant=_grant(grant))
        case commands.Ended() as reply:
            return h.Answered(
                call=call,
                grant=_grant(reply.next_grant) if reply.next_grant else None,
                decided=_decided(reply.outcome),
                complete=answer.complete,
            )
        case commands.OutcomeKnown(outcome=outcome):
            return h.Answered(call=call, decided=_decided(outcome), complete=answer.complete)
        case commands.Undecided():
            return h.Answered(call=call, undecided=True)
        case _:
            return h.Answered(call=call)
