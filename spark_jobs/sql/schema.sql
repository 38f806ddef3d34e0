-- What the reconciliation keeps, beside the relay's own tables in the same schema. Version 1.
CREATE SCHEMA IF NOT EXISTS oncebox;

CREATE TABLE IF NOT EXISTS oncebox.schema_version (
    component text PRIMARY KEY,
    version integer NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- One row per run. `result` is the whole result as the JSON file has it.
CREATE TABLE IF NOT EXISTS oncebox.reconciliation_runs (
    run bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relay text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('full', 'incremental')),
    verdict text NOT NULL CHECK (verdict IN ('clean', 'findings', 'incomplete', 'lagging')),
    started_at timestamptz NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT now(),
    rows_checked bigint NOT NULL,
    findings bigint NOT NULL,
    lag bigint NOT NULL,
    snapshot_xmin bigint NOT NULL,
    lsn pg_lsn NOT NULL,
    config_hash text NOT NULL,
    result jsonb NOT NULL
);

-- How far each source was found clean, and by which run: the next one begins there.
CREATE TABLE IF NOT EXISTS oncebox.reconciliation_verified (
    relay text NOT NULL,
    source integer NOT NULL,
    next_offset bigint NOT NULL,
    feed_positions jsonb NOT NULL DEFAULT '{}',
    snapshot_xmin bigint NOT NULL,
    -- Of the cluster whose transaction ids these are: a mark that came with a restore into another one counts for nothing.
    system_identifier bigint NOT NULL,
    config_hash text NOT NULL,
    run bigint NOT NULL REFERENCES oncebox.reconciliation_runs ON DELETE CASCADE,
    PRIMARY KEY (relay, source)
);

INSERT INTO oncebox.schema_version (component, version) VALUES ('reconciliation', 1) ON CONFLICT DO NOTHING;
