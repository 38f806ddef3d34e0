-- What `oncebox outbox init` makes. Each block is shown before it is run; {…} are identifiers of the settings.

-- name: own_tables
CREATE SCHEMA IF NOT EXISTS oncebox;

CREATE TABLE IF NOT EXISTS oncebox.outbox_relay (
    name text PRIMARY KEY,
    version integer NOT NULL DEFAULT 1,
    -- The slot, or commit_seq.
    source text NOT NULL,
    -- The database as it was when it was last known to be the same.
    system_identifier text NOT NULL,
    timeline integer NOT NULL,
    -- Up to here there was nothing to publish.
    idle_lsn pg_lsn NOT NULL,
    -- Raised by each owner; what an owner notes counts only while it is still its own.
    fence bigint NOT NULL DEFAULT 0,
    owner text NOT NULL DEFAULT '',
    owner_since timestamptz NOT NULL DEFAULT now(),
    is_paused boolean NOT NULL DEFAULT false,
    state text NOT NULL DEFAULT 'NEVER STARTED',
    message text NOT NULL DEFAULT '',
    rows_published bigint NOT NULL DEFAULT 0,
    published_position numeric NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now(),
    -- The owner is alive: noted every second, whatever it is doing.
    beat_at timestamptz NOT NULL DEFAULT now()
);

-- Transactions with a bad row, whole, and later ones with a key of theirs. In the order of (position, number).
CREATE TABLE IF NOT EXISTS oncebox.outbox_parked (
    name text NOT NULL REFERENCES oncebox.outbox_relay,
    position numeric NOT NULL,
    number integer NOT NULL,
    row_id text,
    aggregatetype bytea,
    aggregateid bytea,
    type bytea,
    payload bytea,
    headers bytea,
    reason text NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT now(),
    -- Given by `oncebox outbox parked --retry`, one for all that are parked then: the relay publishes them.
    retry uuid,
    PRIMARY KEY (name, position, number)
);

-- name: outbox_table
CREATE TABLE IF NOT EXISTS {table} (
    {id} uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    {aggregatetype} text NOT NULL,
    {aggregateid} text NOT NULL,
    {type} text NOT NULL,
    {payload} jsonb,
    {headers} jsonb,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- name: publication
CREATE PUBLICATION {publication} FOR TABLE {table} WITH (publish = 'insert', publish_via_partition_root = true);

-- name: slot
SELECT pg_create_logical_replication_slot({slot}, 'pgoutput');

-- name: register
INSERT INTO oncebox.outbox_relay (name, source, system_identifier, timeline, idle_lsn)
SELECT {name}, {source}, (SELECT system_identifier::text FROM pg_control_system()),
       ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer,
       coalesce((SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = {source}), '0/0')
ON CONFLICT (name) DO NOTHING;

-- name: commit_seq
-- A transaction's rows are known by its id; one entry per transaction says which place in the order of commits it has.
ALTER TABLE {table} ADD COLUMN IF NOT EXISTS oncebox_transaction xid8 NOT NULL DEFAULT pg_current_xact_id();
ALTER TABLE {table} ADD COLUMN IF NOT EXISTS oncebox_number bigserial;
CREATE INDEX IF NOT EXISTS {index} ON {table} (oncebox_transaction);
CREATE SEQUENCE IF NOT EXISTS oncebox.outbox_commit_seq;
CREATE TABLE IF NOT EXISTS oncebox.outbox_commit (
    commit_seq bigint PRIMARY KEY,
    outbox regclass NOT NULL,
    transaction_id xid8 NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (transaction_id, outbox)
);

-- The lock is held until the transaction has committed and is visible, so the order of commit_seq is that of commits.
CREATE OR REPLACE FUNCTION oncebox.outbox_give_commit_seq() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF current_setting('oncebox.outbox_given', true) IS DISTINCT FROM pg_current_xact_id()::text || TG_RELID THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('oncebox.outbox_commit_seq', 0));
        INSERT INTO oncebox.outbox_commit (commit_seq, outbox, transaction_id)
        VALUES (nextval('oncebox.outbox_commit_seq'), TG_RELID, pg_current_xact_id())
        ON CONFLICT DO NOTHING;
        PERFORM set_config('oncebox.outbox_given', pg_current_xact_id()::text || TG_RELID, true);
    END IF;
    RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS oncebox_outbox_commit_seq ON {table};
CREATE CONSTRAINT TRIGGER oncebox_outbox_commit_seq AFTER INSERT ON {table}
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION oncebox.outbox_give_commit_seq();
-- Whoever switches triggers off and on again leaves a mark by which the relay knows.
ALTER TABLE {table} ENABLE ALWAYS TRIGGER oncebox_outbox_commit_seq;
