"""What can go wrong, one class per error name. The class says what to do next (`advice`), the text says that and why.

RetriableError: the same call may be made again. AbortableError: abort the transaction and go on. FatalError: this
producer is done; its id may belong to somebody else.
"""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar

from oncebox.v1 import transaction_pb2

if TYPE_CHECKING:
    from oncebox.reader.types import Record


class OnceboxError(Exception):
    """The root of all errors that Oncebox raises."""

    # What to do next, for a person.
    advice: ClassVar[str] = ""
    # Which transaction it is about, where it is about one. The number is 0 while the one before has not ended.
    transactional_id: str = ""
    number: int = 0

    def about(self, transactional_id: str, number: int) -> None:
        """Names the transaction, unless it is about one already."""
        if not self.transactional_id:
            self.transactional_id, self.number = transactional_id, number

    def __str__(self) -> str:
        which = f"transaction {self.number}" if self.number else "the next transaction"
        whose = f" ({which} of {self.transactional_id!r})" if self.transactional_id else ""
        return f"{super().__str__()}{whose}" + (f". {self.advice}" if self.advice else "")


class RetriableError(OnceboxError):
    """The client has tried until its timeout; the same call may be made again."""

    advice = "The same call may be made again."


class AbortableError(OnceboxError):
    """The transaction cannot be committed any more; the producer is as good as before."""

    advice = "Abort the transaction and go on with the next."


class FatalError(OnceboxError):
    """Nothing more can be done with this producer, or reader."""

    advice = "Stop, and find out why before a new one is started."


class ClosedError(OnceboxError):
    """The producer or reader is not started, or closed already."""

    advice = "Use it as a context manager, or start it first; what is closed stays so."


class UsageError(OnceboxError):
    """A call out of place, such as a send outside a transaction. Nothing was done."""

    advice = "Nothing was done."


class UnknownTopicError(UsageError):
    """The topic, or the partition of it, does not exist. Nothing was buffered; the transaction can go on."""

    advice = "Create the topic first; Oncebox creates none by itself."


class RecordTooLargeError(UsageError):
    """The record is larger than a request may be. It was not buffered; the transaction can go on without it."""

    advice = "Send a smaller one, or raise request_bytes and the topic's max.message.bytes with it."


class BrokersUnavailableError(RetriableError):
    """No broker answered, or none lets us in."""

    advice = "See whether the brokers run, and whether address and credentials are right."


class DeliveryError(AbortableError):
    """Records could not be written in time, or were refused by a broker."""


class RecordsRefusedError(DeliveryError):
    """A broker refused records for what they are: sending the same again will not help. `code` is its error's name."""

    def __init__(self, told: str, code: str = "") -> None:
        super().__init__(told)
        self.code = code


class BatchTooLargeError(RecordsRefusedError):
    """A batch is larger than its topic allows."""

    advice = "Abort, and lower batch_bytes, or raise the topic's max.message.bytes."


class WriteNotAllowedError(RecordsRefusedError):
    """The brokers do not let this client write there."""

    advice = "Abort, and ask for the right: WRITE on the topic."


class OutOfOrderSequenceError(RecordsRefusedError):
    """The broker lacks records of this producer that it had acknowledged: they are lost, or its memory of them is."""

    advice = "Abort, and look at the broker's log: acknowledged records should not get lost."


class OffsetsRefusedError(AbortableError):
    """The group's coordinator did not take the offsets. `code` is its error's name, where it gave one."""

    def __init__(self, told: str, code: str = "") -> None:
        super().__init__(told)
        self.code = code


class GroupFencedError(OffsetsRefusedError):
    """The group has gone on without this consumer: its partitions may belong to another (KIP-447)."""

    advice = "Abort, and go on from what the group assigns now."


class ConsumeError(FatalError):
    """The source topics of a transform cannot be read."""


class NamesakeError(ConsumeError):
    """Another member of the consumer group has the same group.instance.id."""

    advice = "Give each process a group.instance.id of its own, or none."


class PoisonRecordError(FatalError):
    """A record that the handler of a transform failed on, again and again; its cause is the handler's last error."""

    advice = "Mend the handler or the record, or choose another poison policy; it is read again at the next start."

    def __init__(self, record: "Record", why: str = "cannot be handled") -> None:
        super().__init__(f"{record.topic}:{record.partition} offset {record.offset} {why}")
        self.record = record


class AbortedError(AbortableError):
    """The transaction was aborted while something of it was still under way."""


class CoordinatorError(OnceboxError):
    """The coordinator's answer to a call that it did not carry out."""

    def __init__(self, detail: transaction_pb2.Error) -> None:
        self.detail = detail
        known = detail.code in transaction_pb2.ErrorCode.values()
        self.code = transaction_pb2.ErrorCode.Name(detail.code) if known else f"ERROR_{detail.code}"
        self.transactional_id = detail.transactional_id
        self.number = detail.number
        number = f" transaction {detail.number}" if detail.number else ""
        whose = f" of {detail.transactional_id!r}{number}" if detail.transactional_id else ""
        super().__init__(f"{self.code}{whose}: {detail.message}{self._more(detail)}")

    def __str__(self) -> str:
        return str(self.args[0])

    def _more(self, detail: transaction_pb2.Error) -> str:
        """What the coordinator's own words do not say."""
        del detail
        return f". {self.advice}" if self.advice else ""


class UnnamedRetriableError(CoordinatorError, RetriableError):
    """Of a coordinator newer than this client."""


class UnnamedFatalError(CoordinatorError, FatalError):
    """Of a coordinator newer than this client."""


class CoordinatorLoadInProgressError(CoordinatorError, RetriableError):
    """The instance that leads this id is still reading its log."""

    advice = "Make the call again in a moment."


class CoordinatorNotAvailableError(CoordinatorError, RetriableError):
    """No coordinator answered, or nobody leads this id just now."""

    advice = "Make the call again; if it stays so, see whether the coordinators run and can reach the brokers."


class NotCoordinatorError(CoordinatorError, RetriableError):
    """Another instance leads this id. The client follows by itself."""

    advice = "Make the call again; the error names the leader where it is known."


class ConcurrentTransactionsError(CoordinatorError, RetriableError):
    """Earlier transactions of this id are still being completed, for a partition is down."""

    advice = "Make the call again, or wait until the partition that the message names has a leader."


class RequestTimedOutError(CoordinatorError, RetriableError):
    """No answer in time. What became of the transaction: Transaction.outcome()."""

    advice = "Ask Transaction.outcome() before anything is done twice."


class ThrottlingQuotaExceededError(CoordinatorError, RetriableError):
    """More than this client may ask for."""

    advice = "Make the call again later, or less often."


class UnknownServerError(CoordinatorError, RetriableError):
    """What the coordinator did not expect; its log tells more under the id in the text."""


class TransactionAbortableError(CoordinatorError, AbortableError):
    """A topic was deleted, or deleted and created again, under this transaction."""


class InvalidTxnStateError(CoordinatorError, AbortableError):
    """The transaction is decided, or in another state than the call needs."""

    advice = "Its outcome is in `detail.outcome`; go on with the next transaction."


class TransactionTimedOutError(InvalidTxnStateError):
    """The transaction outlived its timeout and was aborted. Nobody took the id: go on with the next transaction."""

    advice = "Go on with the next transaction; raise transaction_timeout_ms if this one needed the time."


class MessageTooLargeError(CoordinatorError, AbortableError):
    """The transaction's contents or metadata are larger than the coordinator stores."""

    advice = "Abort, and write fewer partitions or less metadata in one transaction."


class UnknownTopicOrPartitionError(CoordinatorError, AbortableError):
    """The coordinator knows no such topic or partition."""

    advice = "Abort; create the topic first."


class InvalidTopicError(CoordinatorError, AbortableError):
    """No topic has such a name, or it is one of Kafka's or Oncebox's own."""

    advice = "Abort; write to a topic of your own."


class InvalidRequestError(CoordinatorError, AbortableError):
    """The call makes no sense to the coordinator."""

    advice = "Abort; if you did not build the call yourself, report it as a bug."


class TopicAuthorizationFailedError(CoordinatorError, AbortableError):
    """The client may not write to this topic."""

    advice = "Abort; ask for the right, or write elsewhere."


class GroupAuthorizationFailedError(CoordinatorError, AbortableError):
    """The client may not commit this group's offsets."""

    advice = "Abort; ask for the right."


class OutcomeExpiredError(CoordinatorError, AbortableError):
    """Decided so long ago that neither the log nor the feed tells."""

    advice = "Look at the topics themselves; keep the feed longer."


class ProducerFencedError(CoordinatorError, FatalError):
    """A newer instance or an administrator has taken the transactional id: `owner` says who, since when and why."""

    advice = "Stop this instance. If it should be the one that works, stop the other and start this anew."

    def __init__(self, detail: transaction_pb2.Error) -> None:
        super().__init__(detail)
        self.owner = detail.owner

    def _more(self, detail: transaction_pb2.Error) -> str:
        if not detail.owner.since_ms:
            return super()._more(detail)
        since = datetime.fromtimestamp(detail.owner.since_ms / 1000, tz=UTC).isoformat(timespec="milliseconds")
        why = transaction_pb2.Cause.Name(detail.owner.cause)
        return f" (since {since}, cause {why}){super()._more(detail)}"


class OutOfOrderSequenceNumberError(CoordinatorError, AbortableError):
    """Records are missing before those that were sent."""


class DuplicateSequenceNumberError(CoordinatorError, AbortableError):
    """The records were stored before."""


class TransactionalIdNotFoundError(CoordinatorError, FatalError):
    """The id is unknown."""

    advice = "Start a new producer."


class InvalidProducerEpochError(CoordinatorError, FatalError):
    """The epoch is not the one that this number was granted with."""

    advice = "Stop; a copy of this client may be at work with the same grant."


class InvalidProducerIdMappingError(CoordinatorError, FatalError):
    """The id is unknown: it never existed, or has expired after long idleness."""

    advice = "Start a new producer."


class InvalidTransactionTimeoutError(CoordinatorError, FatalError):
    """The transaction timeout is longer than the coordinator allows."""

    advice = "Lower transaction_timeout_ms, or raise the coordinator's limit."


class TransactionalIdAuthorizationFailedError(CoordinatorError, FatalError):
    """The client may not use this transactional id."""

    advice = "Ask for the right, or use another id."


class ClusterAuthorizationFailedError(CoordinatorError, FatalError):
    """No rule of the coordinator lets this caller do what administrators or other instances do."""

    advice = "Ask for `admin` (or `peer`) in the coordinator's rules file."


class AuthenticationFailedError(CoordinatorError, FatalError):
    """The coordinator knows nobody by the certificate or token that was shown, or none was."""

    advice = "Show a good one: SecureChannel, or --cert and --key, or --token-file."


_CLASSES: dict[int, type[CoordinatorError]] = {
    transaction_pb2.UNKNOWN_SERVER_ERROR: UnknownServerError,
    transaction_pb2.TRANSACTION_ABORTABLE: TransactionAbortableError,
    transaction_pb2.REQUEST_TIMED_OUT: RequestTimedOutError,
    transaction_pb2.COORDINATOR_LOAD_IN_PROGRESS: CoordinatorLoadInProgressError,
    transaction_pb2.COORDINATOR_NOT_AVAILABLE: CoordinatorNotAvailableError,
    transaction_pb2.NOT_COORDINATOR: NotCoordinatorError,
    transaction_pb2.CONCURRENT_TRANSACTIONS: ConcurrentTransactionsError,
    transaction_pb2.THROTTLING_QUOTA_EXCEEDED: ThrottlingQuotaExceededError,
    transaction_pb2.INVALID_TXN_STATE: InvalidTxnStateError,
    transaction_pb2.MESSAGE_TOO_LARGE: MessageTooLargeError,
    transaction_pb2.UNKNOWN_TOPIC_OR_PARTITION: UnknownTopicOrPartitionError,
    transaction_pb2.INVALID_TOPIC_EXCEPTION: InvalidTopicError,
    transaction_pb2.INVALID_REQUEST: InvalidRequestError,
    transaction_pb2.TOPIC_AUTHORIZATION_FAILED: TopicAuthorizationFailedError,
    transaction_pb2.GROUP_AUTHORIZATION_FAILED: GroupAuthorizationFailedError,
    transaction_pb2.OUTCOME_EXPIRED: OutcomeExpiredError,
    transaction_pb2.OUT_OF_ORDER_SEQUENCE_NUMBER: OutOfOrderSequenceNumberError,
    transaction_pb2.DUPLICATE_SEQUENCE_NUMBER: DuplicateSequenceNumberError,
    transaction_pb2.TRANSACTIONAL_ID_NOT_FOUND: TransactionalIdNotFoundError,
    transaction_pb2.PRODUCER_FENCED: ProducerFencedError,
    transaction_pb2.INVALID_PRODUCER_EPOCH: InvalidProducerEpochError,
    transaction_pb2.INVALID_PRODUCER_ID_MAPPING: InvalidProducerIdMappingError,
    transaction_pb2.INVALID_TRANSACTION_TIMEOUT: InvalidTransactionTimeoutError,
    transaction_pb2.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: TransactionalIdAuthorizationFailedError,
    transaction_pb2.CLUSTER_AUTHORIZATION_FAILED: ClusterAuthorizationFailedError,
    transaction_pb2.SASL_AUTHENTICATION_FAILED: AuthenticationFailedError,
}


# Of the names with which a broker refuses records, those that ask for something else than the rest.
_REFUSALS: dict[str, type[RecordsRefusedError]] = {
    "OUT_OF_ORDER_SEQUENCE_NUMBER": OutOfOrderSequenceError,
    "MESSAGE_TOO_LARGE": BatchTooLargeError,
    "RECORD_LIST_TOO_LARGE": BatchTooLargeError,
    "TOPIC_AUTHORIZATION_FAILED": WriteNotAllowedError,
    "CLUSTER_AUTHORIZATION_FAILED": WriteNotAllowedError,
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": WriteNotAllowedError,
}


def refused_by_broker(told: str, code: str) -> RecordsRefusedError:
    return _REFUSALS.get(code, RecordsRefusedError)(told, code)


def error_from(detail: transaction_pb2.Error) -> CoordinatorError:
    """The exception for a coordinator's answer."""
    timed_out = detail.outcome.cause == transaction_pb2.TIMEOUT
    if detail.code == transaction_pb2.INVALID_TXN_STATE and timed_out:
        return TransactionTimedOutError(detail)
    kind = _CLASSES.get(detail.code, UnnamedRetriableError if detail.retriable else UnnamedFatalError)
    return kind(detail)
