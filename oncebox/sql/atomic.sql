-- One commit over Kafka and this database: a row for each, under a name that is given once.

-- name: schema
CREATE SCHEMA IF NOT EXISTS oncebox;

-- Tells this database from others that use the same coordinators.
CREATE TABLE IF NOT EXISTS oncebox.atomic_database (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    id uuid NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO oncebox.atomic_database DEFAULT VALUES ON CONFLICT DO NOTHING;

-- `committed` is written by the application in its own transaction, `aborted` by whoever decides in its place. Whichever
-- is there first is what happens in Kafka.
CREATE TABLE IF NOT EXISTS oncebox.atomic_token (
    transactional_id text NOT NULL,
    number bigint NOT NULL,
    result text NOT NULL CHECK (result IN ('committed', 'aborted')),
    decided_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (transactional_id, number)
);

-- name: database_id
-- A dump that is restored elsewhere brings the id along: there it is another database.
SELECT concat_ws('/', id, (SELECT system_identifier FROM pg_control_system()),
    (SELECT oid FROM pg_database WHERE datname = current_database()))
FROM oncebox.atomic_database

-- name: commit_token
WITH durable AS (
    -- Kafka must not be told of a commit that a crash of this server can undo.
    SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on'
        ELSE current_setting('synchronous_commit') END, true)
)
INSERT INTO oncebox.atomic_token (transactional_id, number, result)
SELECT :transactional_id, :number, 'committed' FROM durable
-- As database_id: the database that this very transaction is in.
RETURNING (SELECT concat_ws('/', id, (SELECT system_identifier FROM pg_control_system()),
    (SELECT oid FROM pg_database WHERE datname = current_database())) FROM oncebox.atomic_database)

-- name: limit_wait
SELECT set_config('lock_timeout', :lock_timeout, true), set_config('synchronous_commit', 'on', true)

-- name: abort_token
INSERT INTO oncebox.atomic_token (transactional_id, number, result) VALUES (:transactional_id, :number, 'aborted')
ON CONFLICT DO NOTHING RETURNING result

-- name: result
SELECT result FROM oncebox.atomic_token WHERE transactional_id = :transactional_id AND number = :number

-- name: prune
-- Only what is surely complete: a later transaction of the same id exists. Those aborted stay for ever: somebody may
-- still wake up who wants to commit them.
DELETE FROM oncebox.atomic_token t
WHERE result = 'committed' AND decided_at < now() - make_interval(days => :days)
  AND EXISTS (SELECT FROM oncebox.atomic_token n WHERE n.transactional_id = t.transactional_id AND n.number > t.number)
