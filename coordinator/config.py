"""The coordinator's settings: one typed model with a default for all but the brokers. Reads nothing by itself."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, FilePath, model_validator
from pydantic_settings import SettingsConfigDict

from oncebox.settings import (
    KafkaSection,
    Section,
    ServerTlsSection,
    ServiceSettings,
    TokensSection,
    check_listening,
    identifies,
)

Port = Annotated[int, Field(ge=0, le=65_535)]
Milliseconds = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
TopicName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]


class Limits(Section):
    """What one client may ask for. Beyond it: a named error, and nothing changes."""

    # The longest timeout a producer may ask for, and the longest a heartbeat may extend to.
    transaction_timeout_max_ms: Milliseconds = 900_000
    # Of calls that name no deadline.
    call_timeout_ms: Milliseconds = 30_000
    # A later deadline is cut to this.
    call_timeout_max_ms: Milliseconds = 300_000
    # What one call may name.
    partitions_per_call: Count = 1_000
    # Likewise.
    groups_per_call: Count = 100
    # Client metadata (the resume token) of one transaction.
    metadata_bytes: Count = 64 * 1024
    # Of one gRPC message, either way.
    message_bytes: Count = 4 * 1024 * 1024
    # Requests of one session that may be under way before no more are read. All producers of a process share one, and
    # some may wait long, as for a partition that is down.
    requests_per_session: Count = 1_000
    # Calls at a time on one connection.
    streams_per_connection: Count = 1_000
    # Calls at a time in all; sessions and watches count as calls.
    calls: Count = 10_000
    # Of these, how many one principal may have under way, so that it cannot keep the others out.
    calls_per_principal: Count = 2_000
    # Calls and messages on streams, with bursts of two seconds' worth.
    calls_per_second_per_principal: Count = 20_000
    # Open connections; those beyond are closed at once.
    connections: Count = 10_000
    # What comes with a call beside its message: tokens, trace ids.
    metadata_headers_bytes: Count = 16 * 1024
    # With TLS: an older connection is asked to come anew, and shows its certificate again; its calls get the grace.
    connection_age_ms: Milliseconds = 12 * 3_600_000
    # After that the rest is cut off; clients repeat it elsewhere.
    connection_age_grace_ms: Milliseconds = 30_000
    # Without a call.
    connection_idle_ms: Milliseconds = 900_000
    # For TLS and HTTP/2 to come up.
    handshake_timeout_ms: Milliseconds = 10_000


class TlsSection(ServerTlsSection):
    """Certificates in PEM files, read anew when they change."""

    # Who signs the certificates of the other instances; empty: client_ca_location, else the system's authorities.
    peer_ca_location: FilePath | None = None


class Gateway(Section):
    """Transactions for clients without a Kafka client. Its memory is bounded by these."""

    # Off: it is not served.
    enabled: bool = True
    # Transact streams, and transactions that wait for a lost one to come back.
    sessions: Count = 200
    # Records of one stream that are not acknowledged by the brokers; beyond it nothing more is read.
    window_bytes: Annotated[int, Field(ge=1024 * 1024)] = 4 * 1024 * 1024
    # The longest that a transaction may be asked to wait for its lost stream.
    grace_max_ms: Milliseconds = 60_000
    # CommitBatch: records of one.
    batch_records: Count = 1_000
    # CommitBatch: ids in use.
    batch_ids: Count = 200
    # CommitBatch: bytes of all that are under way.
    batch_waiting_bytes: Count = 64 * 1024 * 1024
    # CommitBatch: an id that has had none for so long is no longer in use.
    batch_idle_ms: Milliseconds = 60_000
    # For how long a repeated request_id is answered as the first one was.
    request_window_ms: Milliseconds = 600_000
    # And for how many commits of an id.
    requests_remembered: Count = 50_000


class CoordinatorSettings(ServiceSettings):
    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(env_prefix="ONCEBOX_COORDINATOR_")

    kafka: KafkaSection
    limits: Limits = Limits()
    tls: TlsSection | None = None
    tokens: TokensSection | None = None
    # Who may do what: a YAML file, read anew on SIGHUP. Without it everybody who is let in may do everything.
    rules_location: FilePath | None = None
    # A file with the token that this instance shows to the others; with client certificates it is not needed.
    peer_token_location: FilePath | None = None
    gateway: Gateway = Gateway()

    # Loopback unless asked for more.
    listen_host: str = "127.0.0.1"
    # For gRPC; 0 lets the system choose.
    listen_port: Port = 7171
    # For orchestrators and Prometheus over plain HTTP: /live, /ready and /metrics.
    http_port: Port = 7172
    # Where that listens; empty: as listen_host.
    http_host: str = ""
    # Without TLS and an identity of clients, listening beyond this machine must be meant.
    insecure_listen: bool = False
    # Where clients and other instances reach this one; empty: the host and port it listens on.
    advertised_address: str = ""

    # The compacted topic that holds the truth.
    log_topic: TopicName = "oncebox.log"
    # Fixed once the log is made.
    log_partitions: Annotated[int, Field(ge=1, le=1_000)] = 16
    # Where each commit leaves its manifest.
    feed_topic: TopicName = "oncebox.commits"
    # At least as long as the topics it describes are kept; -1: for ever.
    feed_retention_ms: Annotated[int, Field(ge=-1)] = 30 * 24 * 3_600_000
    # Ids idle for longer are forgotten, unless they hold a resume token.
    id_expiration_ms: Milliseconds = 7 * 24 * 3_600_000
    # Refuse to start where the cluster is not set up as durably as exactly-once needs.
    strict: bool = False
    # Begin anew where the log is gone and the feed remembers one: see docs/when-the-log-is-lost.md first.
    accept_lost_log: bool = False
    # Lets grpcurl and its like list the services; off, for it tells strangers what there is.
    reflection: bool = False
    # How long a stop lets calls, and what the gateway has under way, come to their end.
    drain_ms: Milliseconds = 10_000
    # Read anew on SIGHUP.
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    # One JSON object a line, with the transaction's id and number as fields; or text for people.
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_listening(self)
        if self.rules_location and self.reflection:
            raise ValueError("reflection answers everybody, which rules_location forbids: switch one of them off")
        if self.listen_host in {"0.0.0.0", "::"} and not self.advertised_address:
            raise ValueError(f"listen_host {self.listen_host} is no place to call: set advertised_address")
        if self.log_topic == self.feed_topic:
            raise ValueError("log_topic and feed_topic must differ")
        if self.limits.call_timeout_ms > self.limits.call_timeout_max_ms:
            raise ValueError("limits.call_timeout_ms must not be above limits.call_timeout_max_ms")
        return self

    @property
    def has_identity(self) -> bool:
        return identifies(self.tls, self.tokens)


def internal_topics(settings: CoordinatorSettings) -> frozenset[str]:
    """Topics that no client's transaction may name: markers there would be written with our privilege, not theirs."""
    kafkas_own = {"__consumer_offsets", "__transaction_state", "__cluster_metadata", "__share_group_state"}
    return frozenset(kafkas_own | {settings.log_topic, settings.feed_topic})
