-- What a running relay asks and tells.

-- name: commit_durably
-- Kafka is told of parked rows and fences, which a crash of this server must not undo. Whatever else role, database or
-- server ask for stays; `off` alone is overruled.
SELECT set_config('synchronous_commit', CASE setting WHEN 'off' THEN 'on' ELSE setting END, false)
FROM current_setting('synchronous_commit') setting

-- name: try_lead
SELECT pg_try_advisory_lock(hashtextextended('oncebox.outbox_relay.' || %(name)s, 0))

-- name: try_source
-- A slot or a table has one reader, whatever that is called.
SELECT pg_try_advisory_lock(hashtextextended('oncebox.outbox_source.' || %(source)s, 0))

-- name: leader
-- The session that leads, and when it said last that it is alive.
SELECT l.pid, r.beat_at FROM pg_locks l, oncebox.outbox_relay r
WHERE r.name = %(name)s
  AND l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('oncebox.outbox_relay.' || %(name)s, 0)

-- name: end_session
SELECT pg_terminate_backend(%(pid)s)

-- name: fence
SELECT fence FROM oncebox.outbox_relay WHERE name = %(name)s

-- name: beat
-- As note_state, nothing that a crash of the server must not lose: nobody waits for its disk.
UPDATE oncebox.outbox_relay SET beat_at = now() FROM set_config('synchronous_commit', 'off', true)
WHERE name = %(name)s AND fence = %(fence)s

-- name: raise_fence
UPDATE oncebox.outbox_relay
SET fence = fence + 1, owner = %(owner)s, owner_since = now(), state = 'STARTING', message = '', updated_at = now(),
    beat_at = now()
WHERE name = %(name)s
RETURNING fence, source, system_identifier, timeline, idle_lsn - '0/0'::pg_lsn, is_paused, published_position

-- name: identity
SELECT system_identifier::text, pg_is_in_recovery(), current_setting('server_version_num')::integer,
       CASE WHEN NOT pg_is_in_recovery()
            THEN ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer END,
       CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_flush_lsn() - '0/0'::pg_lsn END,
       (SELECT oid::text FROM pg_database WHERE datname = current_database())
FROM pg_control_system()

-- name: slot
SELECT plugin, database = current_database(), active_pid, confirmed_flush_lsn - '0/0'::pg_lsn, wal_status,
       pg_current_wal_lsn() - restart_lsn, confirmed_flush_lsn - restart_lsn, age(catalog_xmin)
FROM pg_replication_slots WHERE slot_name = %(slot)s

-- name: is_published
-- Whether the inserts of the table come with the publication, and which of them; no row: there is none. (Before
-- PostgreSQL 15 there are no filters, nor a column for them.)
SELECT pubinsert AND t.tablename IS NOT NULL, to_jsonb(t) ->> 'rowfilter'
FROM pg_publication p
LEFT JOIN pg_publication_tables t
    ON t.pubname = p.pubname AND t.schemaname = %(schema)s AND t.tablename = %(table)s
WHERE p.pubname = %(publication)s

-- name: flush_lsn
SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn

-- name: place
-- Where the log is, and the slot; of a slot that is gone: NULL.
SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn,
       (SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %(slot)s)

-- name: peek
SELECT data FROM pg_logical_slot_peek_binary_changes(%(slot)s, NULL, %(changes_max)s,
    'proto_version', '1', 'publication_names', %(publication)s, 'messages', %(messages)s)

-- name: advance
SELECT pg_replication_slot_advance(%(slot)s, '0/0'::pg_lsn + %(lsn)s::numeric)

-- name: log_snapshot
SELECT pg_log_standby_snapshot()

-- name: note_idle
UPDATE oncebox.outbox_relay SET idle_lsn = '0/0'::pg_lsn + %(lsn)s::numeric, updated_at = now()
WHERE name = %(name)s AND fence = %(fence)s

-- name: note_state
UPDATE oncebox.outbox_relay
SET state = %(state)s, message = %(message)s, rows_published = rows_published + %(rows)s,
    published_position = %(position)s, updated_at = now()
FROM set_config('synchronous_commit', 'off', true)
WHERE name = %(name)s AND fence = %(fence)s
RETURNING is_paused

-- name: parked
SELECT position, aggregatetype, aggregateid, retry IS NOT NULL FROM oncebox.outbox_parked WHERE name = %(name)s

-- name: fence_for_parking
SELECT FROM oncebox.outbox_relay WHERE name = %(name)s AND fence = %(fence)s FOR UPDATE

-- name: park
INSERT INTO oncebox.outbox_parked
    (name, position, number, row_id, aggregatetype, aggregateid, type, payload, headers, reason)
VALUES (%(name)s, %(position)s, %(number)s, %(row_id)s, %(aggregatetype)s, %(aggregateid)s, %(type)s, %(payload)s,
    %(headers)s, %(reason)s)
ON CONFLICT DO NOTHING

-- name: lock_relay
SELECT FROM oncebox.outbox_relay WHERE name = %(name)s FOR UPDATE

-- name: parked_rows
SELECT position, convert_to(row_id, 'UTF8'), aggregatetype, aggregateid, payload, type, headers
FROM oncebox.outbox_parked WHERE name = %(name)s ORDER BY position, number

-- name: parked_list
SELECT position, row_id, reason || CASE WHEN retry IS NULL THEN '' ELSE ' (handed back to the relay)' END
FROM oncebox.outbox_parked WHERE name = %(name)s ORDER BY position, number LIMIT %(limit)s

-- name: parked_is_settled
-- Whether the relay is surely past all of them: what it may read again after a crash must stay known as parked.
SELECT coalesce(max(p.position) <= max(r.published_position), true)
FROM oncebox.outbox_relay r LEFT JOIN oncebox.outbox_parked p USING (name) WHERE r.name = %(name)s

-- name: discard
DELETE FROM oncebox.outbox_parked WHERE name = %(name)s

-- name: is_retry_asked
SELECT EXISTS (SELECT FROM oncebox.outbox_parked WHERE name = %(name)s AND retry IS NOT NULL)

-- name: ask_retry
UPDATE oncebox.outbox_parked SET retry = %(retry)s WHERE name = %(name)s

-- name: join_retry
UPDATE oncebox.outbox_parked p SET retry = asked.retry
FROM (SELECT retry FROM oncebox.outbox_parked WHERE name = %(name)s AND retry IS NOT NULL LIMIT 1) asked
WHERE p.name = %(name)s AND p.retry IS NULL AND asked.retry::text <> %(done)s

-- name: retry_asked
SELECT retry::text, position, convert_to(row_id, 'UTF8'), aggregatetype, aggregateid, payload, type, headers
FROM oncebox.outbox_parked WHERE name = %(name)s AND retry IS NOT NULL ORDER BY position, number

-- name: refuse_retry
UPDATE oncebox.outbox_parked
SET retry = NULL, reason = CASE WHEN row_id IS NOT DISTINCT FROM %(row_id)s THEN %(reason)s ELSE reason END
WHERE name = %(name)s AND retry = %(retry)s::uuid

-- name: forget_retried
DELETE FROM oncebox.outbox_parked WHERE name = %(name)s AND retry = %(retry)s::uuid

-- name: oldest_writer
-- In any database of the server, and those that are prepared: each of them makes the slot keep the log.
SELECT what, extract(epoch FROM now() - since)::float8 FROM (
    SELECT format('process %%s (%%s, %%s, database %%s)', pid, coalesce(nullif(application_name, ''), 'unnamed'), state,
        datname) AS what, xact_start AS since
    FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
    UNION ALL
    SELECT format('the prepared transaction %%L (database %%s)', gid, database), prepared FROM pg_prepared_xacts
) writers ORDER BY since LIMIT 1

-- name: set_paused
UPDATE oncebox.outbox_relay SET is_paused = %(is_paused)s WHERE name = %(name)s

-- name: status
SELECT r.name, r.state, r.message, r.owner, r.owner_since, r.is_paused, r.rows_published, r.updated_at, r.source,
       s.active_pid, s.wal_status, pg_current_wal_lsn() - s.restart_lsn, age(s.catalog_xmin),
       (SELECT count(*) FROM oncebox.outbox_parked p WHERE p.name = r.name)
FROM oncebox.outbox_relay r LEFT JOIN pg_replication_slots s ON s.slot_name = r.source
ORDER BY r.name

-- name: insert_lsn
SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn

-- name: commit_seq_trigger
-- ENABLE ALWAYS, as init makes it: in a session of a replica, too, each row counts; and DISABLE TRIGGER ALL with ENABLE
-- TRIGGER ALL, as of a bulk load whose rows have no number, leaves another mark.
SELECT tgenabled = 'A' AND tgqual IS NULL AND tgfoid = to_regproc('oncebox.outbox_give_commit_seq')
FROM pg_trigger WHERE tgname = 'oncebox_outbox_commit_seq' AND tgrelid = to_regclass(%(table)s)

-- name: commit_seq_parts
-- Tables whose rows are this one's, and whose inserts its trigger does not see, or takes for another table's.
SELECT count(*) FROM pg_inherits WHERE inhparent = %(table)s::regclass

-- name: commit_seq_newest
SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM oncebox.outbox_commit_seq

-- name: commit_seq_next
SELECT commit_seq, transaction_id, (extract(epoch FROM committed_at) * 1000000)::bigint FROM oncebox.outbox_commit
WHERE outbox = %(table)s::regclass ORDER BY commit_seq LIMIT %(limit)s

-- name: commit_seq_lock
SELECT pg_advisory_xact_lock(hashtextextended('oncebox.outbox_commit_seq', 0))

-- name: keep_from_starting
-- No slot has such a name: no relay starts until a resync is at its end.
UPDATE oncebox.outbox_relay SET source = %(why)s, updated_at = now() WHERE name = %(name)s AND fence = %(fence)s
RETURNING name

-- name: note_slot
-- For a resync that follows this one, should it fail.
UPDATE oncebox.outbox_relay
SET idle_lsn = '0/0'::pg_lsn + %(lsn)s::numeric, system_identifier = %(system_identifier)s, timeline = %(timeline)s,
    updated_at = now()
WHERE name = %(name)s AND fence = %(fence)s
RETURNING name

-- name: restart
-- What is parked keeps its order, at positions that the new source never gives.
WITH shifted AS (
    UPDATE oncebox.outbox_parked p SET position = p.position - s.span
    FROM (SELECT max(position) - least(min(position), 0) + 1 AS span FROM oncebox.outbox_parked
          WHERE name = %(name)s) s
    WHERE p.name = %(name)s
      AND EXISTS (SELECT FROM oncebox.outbox_relay r WHERE r.name = %(name)s AND r.fence = %(fence)s)
)
UPDATE oncebox.outbox_relay
SET source = %(source)s, system_identifier = %(system_identifier)s, timeline = %(timeline)s,
    idle_lsn = '0/0'::pg_lsn + %(lsn)s::numeric, state = 'RESYNCED', message = '', updated_at = now()
WHERE name = %(name)s AND fence = %(fence)s
RETURNING name

-- name: forget_settled
DELETE FROM oncebox.outbox_parked WHERE name = %(name)s AND position = ANY(%(positions)s::numeric[])

-- name: commit_seq_forget
DELETE FROM oncebox.outbox_commit WHERE commit_seq <= %(position)s AND outbox = %(table)s::regclass
