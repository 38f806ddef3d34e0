-- name: relays
SELECT relay, mode, fence FROM oncebox.relay ORDER BY relay;

-- name: positions
SELECT p.source, s.topic, replace(s.topic_id::text, '-', ''), s.partition, p.start_offset, p.next_offset,
    (SELECT coalesce(array_agg(ARRAY[lower(r), upper(r)] ORDER BY r), '{}') FROM unnest(p.applied_beyond) AS r),
    p.high_offset, p.waits_for
FROM oncebox.position AS p JOIN oncebox.source AS s USING (source)
WHERE p.relay = %(relay)s ORDER BY s.topic, s.partition, p.source;

-- name: targets
SELECT topic, table_schema, table_name, mapping FROM oncebox.target WHERE relay = %(relay)s
ORDER BY table_schema, table_name, topic;

-- name: dead_letters
SELECT source, record_offset, state, error FROM oncebox.dead_letter
WHERE relay = %(relay)s AND state <> 'replayed' ORDER BY source, record_offset LIMIT %(limit)s;

-- name: letters_at
SELECT DISTINCT l.source, l.record_offset
FROM unnest(%(sources)s::integer[], %(offsets)s::bigint[]) AS v(source, record_offset)
JOIN oncebox.dead_letter AS l USING (source, record_offset) WHERE l.relay = %(relay)s;

-- name: replayed_letters
-- Somebody may have mended the value before: the row was made of the letter, not of the record.
SELECT DISTINCT ON (l.source, l.record_offset) l.source, l.record_offset, s.topic, s.partition,
    (extract(epoch FROM l.record_at) * 1000)::bigint, l.key, l.value
FROM oncebox.dead_letter AS l JOIN oncebox.source AS s USING (source)
WHERE l.relay = %(relay)s AND l.state = 'replayed' ORDER BY l.source, l.record_offset, l.id DESC LIMIT %(limit)s;

-- name: letters_replayed_since
-- Below the mark of a run, which has left them out. A row's xmin has 32 bits; put before the snapshot's end it has all 64.
SELECT DISTINCT l.source, l.record_offset
FROM oncebox.dead_letter AS l JOIN oncebox.reconciliation_verified AS v USING (relay, source)
CROSS JOIN LATERAL (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint) AS s (now)
WHERE l.relay = %(relay)s AND l.state = 'replayed' AND v.run = %(run)s AND l.record_offset < v.next_offset
    AND s.now - ((s.now - l.xmin::text::bigint) & 4294967295) >= v.snapshot_xmin;

-- name: feed_positions
SELECT partition, next_offset FROM oncebox.feed_position WHERE relay = %(relay)s;

-- name: verified
-- By the last run that left a mark: it has marked every source that there was.
SELECT v.source, v.next_offset, v.feed_positions, v.snapshot_xmin, v.run,
    (extract(epoch FROM r.started_at) * 1000)::bigint
FROM oncebox.reconciliation_verified AS v JOIN oncebox.reconciliation_runs AS r USING (run)
WHERE v.relay = %(relay)s AND v.config_hash = %(config_hash)s AND v.system_identifier = %(system_identifier)s
    AND v.run = (SELECT max(run) FROM oncebox.reconciliation_verified WHERE relay = %(relay)s);

-- name: records_applied
SELECT coalesce(sum(next_offset - start_offset), 0)::bigint FROM oncebox.position WHERE relay = %(relay)s OR %(relay)s = '';

-- name: records_unverified
SELECT coalesce(sum(p.next_offset - greatest(p.start_offset, v.next_offset)), 0)::bigint
FROM oncebox.position AS p LEFT JOIN oncebox.reconciliation_verified AS v USING (relay, source)
WHERE p.relay = %(relay)s OR %(relay)s = '';

-- name: columns
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attgenerated <> '' FROM pg_attribute AS a
WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped;

-- name: is_hidden
-- Whether row-level security applies to whoever asks, in the table or a partition of it.
SELECT coalesce(bool_or(row_security_active(t.relid::oid)), false)
FROM (SELECT to_regclass(%(table)s) UNION SELECT relid FROM pg_partition_tree(to_regclass(%(table)s))) AS t (relid);

-- name: followers
-- Foreign keys by which others would go, or change, with a deleted row: (c)ascade, set (n)ull, set (d)efault.
SELECT n.nspname, c.relname, array_agg(a.attname::text ORDER BY u.at), array_agg(f.attname::text ORDER BY u.at)
FROM pg_constraint AS k JOIN pg_class AS c ON c.oid = k.conrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_class AS r ON r.oid = k.confrelid JOIN pg_namespace AS s ON s.oid = r.relnamespace
CROSS JOIN LATERAL unnest(k.conkey, k.confkey) WITH ORDINALITY AS u (mine, theirs, at)
JOIN pg_attribute AS a ON a.attrelid = k.conrelid AND a.attnum = u.mine
JOIN pg_attribute AS f ON f.attrelid = k.confrelid AND f.attnum = u.theirs
WHERE k.contype = 'f' AND k.confdeltype IN ('c', 'n', 'd') AND k.conparentid = 0
    AND s.nspname = %(schema)s AND r.relname = %(table)s
GROUP BY k.oid, n.nspname, c.relname
ORDER BY n.nspname, c.relname, k.oid;

-- name: unique_keys
-- Indexes that keep two rows of one key apart.
SELECT array_agg(a.attname::text)
FROM pg_index AS i CROSS JOIN LATERAL unnest(i.indkey[0:i.indnkeyatts - 1]) AS k (attnum)
JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = to_regclass(%(table)s) AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
    AND i.indexprs IS NULL
GROUP BY i.indexrelid;

-- name: leaves
SELECT t.relid::regclass::text, pg_relation_size(t.relid) / current_setting('block_size')::bigint
FROM pg_partition_tree(to_regclass(%(table)s)) AS t WHERE t.isleaf
UNION ALL
SELECT to_regclass(%(table)s)::text, pg_relation_size(to_regclass(%(table)s)) / current_setting('block_size')::bigint
WHERE NOT EXISTS (SELECT FROM pg_partition_tree(to_regclass(%(table)s)));

-- name: storage
-- Of a table and its partitions: the files of rows. By names and ids as the asking session's snapshot has them.
WITH RECURSIVE part AS (
    SELECT c.oid, c.relfilenode FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = %(table)s
    UNION ALL
    SELECT c.oid, c.relfilenode FROM part JOIN pg_inherits AS i ON i.inhparent = part.oid
    JOIN pg_class AS c ON c.oid = i.inhrelid
)
SELECT oid, relfilenode FROM part;

-- name: insert_run
INSERT INTO oncebox.reconciliation_runs
    (relay, kind, verdict, started_at, rows_checked, findings, lag, snapshot_xmin, lsn, config_hash, result)
VALUES (%(relay)s, %(kind)s, %(verdict)s, %(started_at)s, %(rows_checked)s, %(findings)s, %(lag)s, %(snapshot_xmin)s,
    %(lsn)s, %(config_hash)s, %(result)s)
RETURNING run;

-- name: set_verified
-- Unless the relay was rewound, rebuilt or taken over since the cut: what was verified may be written anew by now.
INSERT INTO oncebox.reconciliation_verified
    (relay, source, next_offset, feed_positions, snapshot_xmin, system_identifier, config_hash, run)
SELECT %(relay)s, %(source)s, %(next_offset)s, %(feed_positions)s, %(snapshot_xmin)s, %(system_identifier)s,
    %(config_hash)s, %(run)s
FROM oncebox.relay AS r WHERE r.relay = %(relay)s AND r.fence = %(fence)s
ON CONFLICT (relay, source) DO UPDATE SET next_offset = EXCLUDED.next_offset, feed_positions = EXCLUDED.feed_positions,
    snapshot_xmin = EXCLUDED.snapshot_xmin, system_identifier = EXCLUDED.system_identifier,
    config_hash = EXCLUDED.config_hash, run = EXCLUDED.run;

-- name: forget_runs
DELETE FROM oncebox.reconciliation_runs WHERE relay = %(relay)s AND run <= %(run)s - %(kept)s
    AND run NOT IN (SELECT run FROM oncebox.reconciliation_verified);

-- name: history
SELECT run, kind, verdict, started_at, finished_at, rows_checked, findings, lag FROM oncebox.reconciliation_runs
WHERE %(relay)s = '' OR relay = %(relay)s ORDER BY run DESC LIMIT %(limit)s;

-- name: staged
SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%(schema)s) AND relkind = 'r'
    AND starts_with(relname, %(prefix)s);

-- name: other_relays
SELECT DISTINCT relay FROM oncebox.target
WHERE relay <> %(relay)s AND table_schema = %(schema)s AND table_name = %(table)s ORDER BY relay;

-- name: letters_counted
SELECT count(*) FILTER (WHERE state <> 'replayed'), count(*) FILTER (WHERE state = 'replayed')
FROM oncebox.dead_letter WHERE relay = %(relay)s;
