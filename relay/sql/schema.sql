-- The relay's own tables, version 3. Everything here changes in the same database transaction as the rows it tells of.
-- Readers (reconciliation, status, repair) may rely on every name and comment; a change is a new version.

CREATE SCHEMA IF NOT EXISTS oncebox;

-- One row per part of Oncebox that keeps tables in this schema ('relay' here), with the version they have.
CREATE TABLE IF NOT EXISTS oncebox.schema_version (
    component text PRIMARY KEY,
    version integer NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- A relay, by the name in its configuration. Transaction mode: `fence` is the active process's, and is raised together with
-- the fence of all its positions; whoever holds a lower one cannot commit. Partition mode: each position has its own.
CREATE TABLE oncebox.relay (
    relay text PRIMARY KEY,
    mode text NOT NULL CHECK (mode IN ('transaction', 'partition')),
    fence bigint NOT NULL DEFAULT 0,
    -- Transaction mode: the active process (null: none), its session in this server, and its last sign of life.
    owner text,
    owner_since timestamptz,
    owner_backend integer,
    owner_backend_start timestamptz,
    beat_at timestamptz,
    -- Transaction mode: how many batches were committed.
    commits bigint NOT NULL DEFAULT 0,
    paused boolean NOT NULL DEFAULT false,
    -- Of the configuration of the process that started last.
    config_hash text NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now()
);

-- A short number for one partition of one incarnation of a topic (Kafka's topic id: made again, it is another).
CREATE TABLE oncebox.source (
    source integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic text NOT NULL,
    topic_id uuid NOT NULL,
    partition integer NOT NULL,
    UNIQUE (topic_id, partition)
);

-- Every record in [start_offset, next_offset) and in applied_beyond is applied, parked, held or skipped; no other is.
-- (Partition mode: applied_beyond is always empty.)
CREATE TABLE oncebox.position (
    relay text NOT NULL REFERENCES oncebox.relay,
    source integer NOT NULL REFERENCES oncebox.source,
    start_offset bigint NOT NULL,
    next_offset bigint NOT NULL,
    applied_beyond int8multirange NOT NULL DEFAULT '{}',
    -- The highest next_offset or end of applied_beyond there ever was. Above next_offset only after a rewind: rows may
    -- then carry offsets up to it that are not applied again yet.
    high_offset bigint NOT NULL,
    fence bigint NOT NULL DEFAULT 0,
    -- Partition mode: whose partition it is.
    owner text,
    owner_since timestamptz,
    -- A partition that was added to its topic is read only while those before it are applied so far:
    -- {"source": next_offset}. Kept for good: after a rebuild all of it is read again. Null: it was there from the start.
    waits_for jsonb,
    -- The timestamp of the newest record applied.
    record_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (relay, source),
    CHECK (start_offset <= next_offset AND next_offset <= high_offset)
);

-- Transaction mode: the feed of commits, never past a commit that is not applied.
CREATE TABLE oncebox.feed_position (
    relay text NOT NULL REFERENCES oncebox.relay,
    partition integer NOT NULL,
    next_offset bigint NOT NULL,
    fence bigint NOT NULL DEFAULT 0,
    -- Of which the commits below are applied: of others they were passed over. Null: not known, from before version 3.
    topics text[],
    PRIMARY KEY (relay, partition)
);

-- Records that count as applied for the positions, and whose rows were not written.
--   parked    bad: `error` says why
--   held      good, but stands behind a parked record of one of its rows (or of its record key, or of its transaction)
--   queued    to be applied by the relay that owns its partition, because somebody asked for it
--   replayed  applied since          skipped   passed over by the policy `skip`          discarded  given up by somebody
-- One that was skipped or discarded is deleted when all of its transaction is read again (after a rewind), and judged anew.
CREATE TABLE oncebox.dead_letter (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relay text NOT NULL REFERENCES oncebox.relay,
    source integer NOT NULL REFERENCES oncebox.source,
    record_offset bigint NOT NULL,
    record_at timestamptz NOT NULL,
    key bytea,
    value bytea,
    -- [[name, base64 or null], ...] in order.
    headers jsonb NOT NULL DEFAULT '[]',
    -- Of the transaction it belongs to; null: of none. All letters of one transaction have one `unit`: its first letter's id.
    transactional_id text,
    number bigint,
    unit bigint NOT NULL,
    error text NOT NULL,
    state text NOT NULL CHECK (state IN ('parked', 'held', 'queued', 'replayed', 'skipped', 'discarded')),
    -- What later records are held behind it: ["record", topic, base64 of the record key] and [table, column, ...].
    -- The first letter of a unit has those of all its records. (Before, each letter had them.)
    holds jsonb NOT NULL DEFAULT '[]',
    parked_at timestamptz NOT NULL DEFAULT now(),
    resolved_at timestamptz
);
CREATE INDEX dead_letter_open ON oncebox.dead_letter (relay, id) WHERE state IN ('parked', 'held', 'queued');
CREATE INDEX dead_letter_record ON oncebox.dead_letter (source, record_offset);

-- What the version guard must remember when the row itself cannot: the last record of `source` that wrote or deleted the
-- row `row_key` (its key columns, in the mapping's order, as a JSON array) of `target_table` ("schema"."table", quoted).
-- Left by a delete, and by a row that another source took over. Pruned once the source's log start has passed the offset.
CREATE TABLE oncebox.tombstone (
    target_table text NOT NULL,
    row_key jsonb NOT NULL,
    source integer NOT NULL REFERENCES oncebox.source,
    record_offset bigint NOT NULL,
    -- Of a table with an ordering column: the delete's value. Never pruned, for another topic may yet bring an older one.
    ordering bigint,
    PRIMARY KEY (target_table, row_key, source)
);
CREATE INDEX tombstone_source ON oncebox.tombstone (source, record_offset);

-- What a topic is mapped to, resolved against the table as it is, so that each row can be computed from its record without
-- the configuration file. `mapping` is
--   {"format": "json" | "debezium", "insert_mode": "upsert" | "insert", "guard": bool, "delete_on_tombstone": bool,
--    "key": [column, ...], "ordering": null | column,
--    "columns": [{"name": …, "type": PostgreSQL's format_type, "path": […], "from": "value" | "key" | "topic" |
--                 "partition" | "offset" | "timestamp" | "header", "unit": null | "s" | "ms" | "us" | "ns" | "days"}, …]}
CREATE TABLE oncebox.target (
    relay text NOT NULL REFERENCES oncebox.relay,
    topic text NOT NULL,
    table_schema text NOT NULL,
    table_name text NOT NULL,
    mapping jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (relay, topic, table_schema, table_name)
);

-- Target rows carry, unless the guard is off, `oncebox_source integer` and `oncebox_offset bigint`: the record that last
-- wrote the row; and with an ordering column `oncebox_ordering bigint`: its value as a whole number (a time in microseconds
-- since 2000, a date in days).
