-- The relay's statements on its own tables, by name.

-- name: version
SELECT version FROM oncebox.schema_version WHERE component = 'relay';

-- name: has_schema
SELECT to_regclass('oncebox.schema_version') IS NOT NULL;

-- name: set_version
INSERT INTO oncebox.schema_version (component, version) VALUES ('relay', %(version)s)
ON CONFLICT (component) DO UPDATE SET version = EXCLUDED.version, applied_at = now();

-- name: upgrade_to_2
ALTER TABLE oncebox.tombstone ADD COLUMN ordering bigint;

-- name: upgrade_to_3
ALTER TABLE oncebox.feed_position ADD COLUMN topics text[];

-- name: describe_table
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity <> '' OR a.attgenerated <> '',
       -- Of a domain: what it is at last, without a length.
       (WITH RECURSIVE base AS (
            SELECT t.typbasetype AS id FROM pg_type t WHERE t.oid = a.atttypid AND t.typtype = 'd'
            UNION ALL
            SELECT t.typbasetype FROM base JOIN pg_type t ON t.oid = base.id WHERE t.typtype = 'd'
        )
        SELECT format_type(t.oid, NULL) FROM base JOIN pg_type t ON t.oid = base.id WHERE t.typtype <> 'd')
FROM pg_attribute a
WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum;

-- name: unique_keys
SELECT array_agg(a.attname::text), i.indimmediate
FROM pg_index i
CROSS JOIN LATERAL unnest(i.indkey) AS k(attnum)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = to_regclass(%(table)s) AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
  AND i.indnkeyatts = i.indnatts AND i.indexprs IS NULL
GROUP BY i.indexrelid, i.indimmediate;

-- name: foreign_keys
SELECT c.conrelid::regclass::oid::int8, c.confrelid::regclass::oid::int8
FROM pg_constraint c
WHERE c.contype = 'f' AND c.conrelid = ANY(%(tables)s::text[]::regclass[]::oid[])
  AND c.confrelid = ANY(%(tables)s::text[]::regclass[]::oid[]);

-- name: has_deferrable
-- Of these tables, or of others that refer to them.
SELECT EXISTS (SELECT FROM pg_constraint c
               WHERE c.condeferrable AND (c.conrelid = ANY(%(tables)s::text[]::regclass[]::oid[])
                                          OR c.confrelid = ANY(%(tables)s::text[]::regclass[]::oid[])));

-- name: plain_tables
-- Those into which COPY does what INSERT does: no view, no rules, no policies, no column that is always the database's.
SELECT t.name FROM unnest(%(tables)s::text[]) AS t(name) JOIN pg_class c ON c.oid = t.name::regclass
WHERE c.relkind IN ('r', 'p') AND NOT c.relhasrules AND NOT row_security_active(c.oid)
  AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attidentity = 'a');

-- name: type_names
SELECT format_type(t.id, t.modifier)
FROM unnest(%(ids)s::oid[], %(modifiers)s::integer[]) WITH ORDINALITY AS t(id, modifier, n) ORDER BY t.n;

-- name: table_ids
SELECT t.name::regclass::oid::int8 FROM unnest(%(tables)s::text[]) WITH ORDINALITY AS t(name, n) ORDER BY t.n;

-- name: ensure_relay
INSERT INTO oncebox.relay (relay, mode) VALUES (%(relay)s, %(mode)s) ON CONFLICT (relay) DO NOTHING;

-- name: relay_mode
SELECT mode FROM oncebox.relay WHERE relay = %(relay)s;

-- name: save_config_hash
UPDATE oncebox.relay SET config_hash = %(config_hash)s WHERE relay = %(relay)s AND config_hash <> %(config_hash)s;

-- name: orderings
SELECT table_schema, table_name, mapping->>'ordering' FROM oncebox.target WHERE relay = %(relay)s;

-- name: forget_targets
DELETE FROM oncebox.target WHERE relay = %(relay)s;

-- name: save_target
INSERT INTO oncebox.target (relay, topic, table_schema, table_name, mapping)
VALUES (%(relay)s, %(topic)s, %(table_schema)s, %(table_name)s, %(mapping)s);

-- name: ensure_sources
INSERT INTO oncebox.source (topic, topic_id, partition)
SELECT * FROM unnest(%(topics)s::text[], %(topic_ids)s::uuid[], %(partitions)s::integer[])
ON CONFLICT (topic_id, partition) DO NOTHING;

-- name: sources
SELECT topic, partition, source FROM oncebox.source WHERE topic_id = ANY(%(topic_ids)s::uuid[]);

-- name: foreign_incarnations
SELECT DISTINCT s.topic, s.topic_id
FROM oncebox.position p JOIN oncebox.source s USING (source)
WHERE p.relay = %(relay)s AND s.topic = ANY(%(topics)s) AND NOT s.topic_id = ANY(%(topic_ids)s::uuid[]);

-- name: positions
SELECT s.topic, s.partition, p.source, p.start_offset, p.next_offset, p.high_offset,
       ARRAY(SELECT ARRAY[lower(r), upper(r)] FROM unnest(p.applied_beyond) AS r), p.fence, p.owner, p.waits_for
FROM oncebox.position p JOIN oncebox.source s USING (source)
WHERE p.relay = %(relay)s AND s.topic_id = ANY(%(topic_ids)s::uuid[]);

-- name: ensure_position
INSERT INTO oncebox.position (relay, source, start_offset, next_offset, high_offset, waits_for)
VALUES (%(relay)s, %(source)s, %(offset)s, %(offset)s, %(offset)s, %(waits_for)s)
ON CONFLICT (relay, source) DO NOTHING;

-- name: take_partitions
-- Raises the fence and gives the position: from here on nobody with an older fence can commit for these partitions.
UPDATE oncebox.position p
SET fence = p.fence + 1, owner = %(owner)s, owner_since = now()
FROM (SELECT source, owner FROM oncebox.position
      WHERE relay = %(relay)s AND source = ANY(%(sources)s) ORDER BY source FOR UPDATE) AS before
WHERE p.relay = %(relay)s AND p.source = before.source
RETURNING p.source, p.next_offset, p.high_offset, p.fence, before.owner, p.waits_for;

-- name: release_partitions
UPDATE oncebox.position SET owner = NULL
FROM unnest(%(sources)s::integer[], %(fences)s::bigint[]) AS mine(s, f)
WHERE relay = %(relay)s AND source = mine.s AND fence = mine.f;

-- name: end_sessions_of
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = ANY(%(names)s) AND usename = current_user AND pid <> pg_backend_pid();

-- name: save_partitions
UPDATE oncebox.position p
SET next_offset = v.after, high_offset = greatest(p.high_offset, v.after),
    record_at = coalesce(v.record_at, p.record_at), updated_at = now()
FROM unnest(%(sources)s::integer[], %(fences)s::bigint[], %(befores)s::bigint[], %(afters)s::bigint[],
            %(record_ats)s::timestamptz[]) AS v(source, fence, before, after, record_at)
WHERE p.relay = %(relay)s AND p.source = v.source AND p.fence = v.fence AND p.next_offset = v.before;

-- name: hold_partitions
SELECT source, fence FROM oncebox.position WHERE relay = %(relay)s AND source = ANY(%(sources)s) ORDER BY source FOR SHARE;

-- name: who_fenced
SELECT p.source, p.fence, p.next_offset, p.owner, p.owner_since
FROM oncebox.position p WHERE p.relay = %(relay)s AND p.source = ANY(%(sources)s);

-- name: next_offsets
SELECT source, next_offset FROM oncebox.position WHERE relay = %(relay)s;

-- name: look_at_owner
SELECT r.fence, r.owner, r.owner_since, r.paused,
       r.owner IS NULL OR r.beat_at IS NULL OR now() - r.beat_at > %(session_ms)s * interval '1 millisecond'
       OR NOT EXISTS (SELECT FROM pg_stat_activity a
                      WHERE a.pid = r.owner_backend AND a.backend_start = r.owner_backend_start) AS is_free
FROM oncebox.relay r WHERE r.relay = %(relay)s;

-- name: take_relay
-- Only from whom we looked at: two that stand by cannot both take it over from the same one.
UPDATE oncebox.relay r
SET fence = r.fence + 1, owner = %(owner)s, owner_since = now(), beat_at = now(),
    owner_backend = pg_backend_pid(),
    owner_backend_start = (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid())
WHERE r.relay = %(relay)s AND r.fence = %(seen)s
RETURNING r.fence;

-- name: fence_positions
UPDATE oncebox.position SET fence = %(fence)s, owner = %(owner)s, owner_since = now()
WHERE relay = %(relay)s
  AND EXISTS (SELECT FROM oncebox.relay r WHERE r.relay = %(relay)s AND r.fence = %(fence)s);

-- name: fence_feed
UPDATE oncebox.feed_position SET fence = %(fence)s WHERE relay = %(relay)s;

-- name: end_session_of_owner
-- Of whom we looked at, not of another that has taken over since.
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a JOIN oncebox.relay r
    ON a.pid = r.owner_backend AND a.backend_start = r.owner_backend_start
WHERE r.relay = %(relay)s AND r.fence = %(seen)s AND a.pid <> pg_backend_pid();

-- name: release_relay
UPDATE oncebox.relay SET owner = NULL WHERE relay = %(relay)s AND fence = %(fence)s;

-- name: beat
UPDATE oncebox.relay SET beat_at = now() WHERE relay = %(relay)s AND fence = %(fence)s RETURNING paused;

-- name: commit_relay
UPDATE oncebox.relay SET beat_at = now(), commits = commits + 1 WHERE relay = %(relay)s AND fence = %(fence)s;

-- name: save_positions
INSERT INTO oncebox.position AS p
    (relay, source, start_offset, next_offset, applied_beyond, high_offset, fence, owner, owner_since, record_at)
SELECT %(relay)s, v.source, v.start, v.next, v.beyond::int8multirange, v.high, %(fence)s, %(owner)s, now(), v.record_at
FROM unnest(%(sources)s::integer[], %(starts)s::bigint[], %(nexts)s::bigint[], %(beyonds)s::text[], %(highs)s::bigint[],
            %(record_ats)s::timestamptz[]) AS v(source, start, next, beyond, high, record_at)
ON CONFLICT (relay, source) DO UPDATE
SET next_offset = EXCLUDED.next_offset, applied_beyond = EXCLUDED.applied_beyond,
    high_offset = greatest(p.high_offset, EXCLUDED.high_offset),
    record_at = coalesce(EXCLUDED.record_at, p.record_at), updated_at = now()
WHERE p.fence = EXCLUDED.fence AND p.next_offset <= EXCLUDED.next_offset;

-- name: save_feed
INSERT INTO oncebox.feed_position AS p (relay, partition, next_offset, fence, topics)
SELECT %(relay)s, v.partition, v.next, %(fence)s, %(topics)s::text[]
FROM unnest(%(partitions)s::integer[], %(nexts)s::bigint[]) AS v(partition, next)
ON CONFLICT (relay, partition) DO UPDATE SET next_offset = EXCLUDED.next_offset, topics = EXCLUDED.topics
WHERE p.fence = EXCLUDED.fence AND p.next_offset <= EXCLUDED.next_offset;

-- name: feed_positions
SELECT partition, next_offset FROM oncebox.feed_position WHERE relay = %(relay)s;

-- name: owner_of
SELECT owner, owner_since, fence FROM oncebox.relay WHERE relay = %(relay)s;

-- name: new_letter_unit
SELECT nextval(pg_get_serial_sequence('oncebox.dead_letter', 'id'));

-- name: save_letter
INSERT INTO oncebox.dead_letter
    (id, relay, source, record_offset, record_at, key, value, headers, transactional_id, number, unit, error, state,
     holds, resolved_at)
OVERRIDING SYSTEM VALUE
VALUES (%(id)s, %(relay)s, %(source)s, %(record_offset)s, %(record_at)s, %(key)s, %(value)s, %(headers)s,
        %(transactional_id)s, %(number)s, %(unit)s, %(error)s, %(state)s, %(holds)s,
        CASE WHEN %(state)s = 'skipped' THEN now() END);

-- name: open_letters
-- A unit's holds come with the first of its letters that is open: as the unit's first letter has them. (Before, each had
-- all of them: too much to be read for long transactions.)
SELECT l.unit, l.state,
       CASE WHEN l.id = min(l.id) OVER (PARTITION BY l.unit) THEN coalesce(f.holds, l.holds) ELSE '[]'::jsonb END, l.source
FROM oncebox.dead_letter l LEFT JOIN oncebox.dead_letter f ON f.id = l.unit
WHERE l.relay = %(relay)s AND l.state IN ('parked', 'held', 'queued')
ORDER BY l.id;

-- name: sum_of_letters
-- Changes whenever there may be something to settle.
SELECT count(*), count(*) FILTER (WHERE state = 'parked'), count(*) FILTER (WHERE state = 'queued'), max(id)
FROM oncebox.dead_letter WHERE relay = %(relay)s AND state IN ('parked', 'held', 'queued');

-- name: take_letters
-- Nobody mends or discards them until they are settled.
SELECT l.state, s.topic, s.partition, l.record_offset, l.record_at, l.key, l.value, l.headers, l.transactional_id, l.number,
       l.source
FROM oncebox.dead_letter l JOIN oncebox.source s USING (source)
WHERE l.relay = %(relay)s AND l.unit = %(unit)s AND l.state IN ('parked', 'held', 'queued')
ORDER BY l.id FOR UPDATE OF l;

-- name: letters_read_again
-- Records that have letters and are to be read again. Those of a transaction of which all is read again are judged anew;
-- where only some of it is, and as long as its letters are open, the letters say what becomes of it.
WITH again AS (
    SELECT DISTINCT l.unit
    FROM oncebox.position p JOIN oncebox.dead_letter l USING (relay, source)
    WHERE p.relay = %(relay)s AND l.record_offset >= p.next_offset AND NOT l.record_offset <@ p.applied_beyond
      AND l.state <> 'replayed'
), letters AS (
    SELECT l.unit, l.source, l.record_offset, l.state IN ('parked', 'held', 'queued') AS is_open,
           coalesce(l.record_offset >= p.next_offset AND NOT l.record_offset <@ p.applied_beyond, false) AS is_read
    FROM again JOIN oncebox.dead_letter l USING (unit) LEFT JOIN oncebox.position p USING (relay, source)
    WHERE l.relay = %(relay)s AND l.state <> 'replayed'
)
SELECT source, record_offset, bool_and(is_anew)
FROM (SELECT *, bool_and(is_read AND NOT is_open) OVER (PARTITION BY unit) AS is_anew FROM letters) AS judged
WHERE is_read GROUP BY source, record_offset;

-- name: forget_letters
-- What became of these records is told by their rows, or by other letters.
DELETE FROM oncebox.dead_letter l USING unnest(%(sources)s::integer[], %(offsets)s::bigint[]) AS v(source, record_offset)
WHERE l.relay = %(relay)s AND l.source = v.source AND l.record_offset = v.record_offset
  AND l.state IN ('skipped', 'discarded');

-- name: allow_planning
-- In this transaction the relay may have to plan for long, while the database hears nothing of it.
SELECT set_config(name, (setting::bigint + %(more_ms)s)::text, true)
FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout' AND setting <> '0';

-- name: count_open_letters
SELECT count(*) FROM oncebox.dead_letter WHERE relay = %(relay)s AND state IN ('parked', 'held', 'queued');

-- name: settle_letters
UPDATE oncebox.dead_letter SET state = %(state)s, error = coalesce(%(error)s, error),
       resolved_at = CASE WHEN %(state)s IN ('replayed', 'discarded') THEN now() END
WHERE relay = %(relay)s AND unit = %(unit)s AND state IN ('parked', 'held', 'queued');

-- name: prune_tombstones
DELETE FROM oncebox.tombstone b
USING unnest(%(sources)s::integer[], %(firsts)s::bigint[]) AS log(source, first)
WHERE b.source = log.source AND b.record_offset < log.first AND b.ordering IS NULL;

-- name: is_paused
SELECT paused FROM oncebox.relay WHERE relay = %(relay)s;

-- name: set_paused
UPDATE oncebox.relay SET paused = %(paused)s WHERE relay = %(relay)s;

-- name: relay_status
SELECT r.mode, r.owner, r.fence, r.paused,
       (SELECT count(*) FROM oncebox.dead_letter l WHERE l.relay = r.relay AND l.state IN ('parked', 'held', 'queued'))
FROM oncebox.relay r WHERE r.relay = %(relay)s;

-- name: partition_status
SELECT s.topic, s.partition, p.next_offset, p.owner
FROM oncebox.position p JOIN oncebox.source s USING (source)
WHERE p.relay = %(relay)s ORDER BY s.topic, s.partition;

-- name: applied_count
-- Of offsets, markers included.
SELECT coalesce(sum(p.next_offset + b.beyond), 0)::int8
FROM oncebox.position p
CROSS JOIN LATERAL (SELECT coalesce(sum(upper(r) - lower(r)), 0) AS beyond FROM unnest(p.applied_beyond) AS r) AS b
WHERE p.relay = %(relay)s;

-- name: take_positions
-- Nobody moves them until they are moved.
SELECT s.topic, s.partition, p.source, p.next_offset,
       ARRAY(SELECT ARRAY[lower(r), upper(r)] FROM unnest(p.applied_beyond) AS r)
FROM oncebox.position p JOIN oncebox.source s USING (source)
WHERE p.relay = %(relay)s AND s.topic_id = ANY(%(topic_ids)s::uuid[]) ORDER BY p.source FOR UPDATE OF p;

-- name: move_positions
UPDATE oncebox.position p
SET next_offset = v.next, start_offset = least(p.start_offset, v.next), applied_beyond = v.beyond::int8multirange,
    high_offset = greatest(p.high_offset, v.next), fence = p.fence + 1, updated_at = now()
FROM unnest(%(sources)s::integer[], %(nexts)s::bigint[], %(beyonds)s::text[]) AS v(source, next, beyond)
WHERE p.relay = %(relay)s AND p.source = v.source;

-- name: fence_relay
UPDATE oncebox.relay SET fence = fence + 1, owner = NULL WHERE relay = %(relay)s;

-- name: forget_feed
DELETE FROM oncebox.feed_position WHERE relay = %(relay)s;

-- name: forget_feed_of_fewer
-- Where it has moved on without one of these topics.
DELETE FROM oncebox.feed_position WHERE relay = %(relay)s AND EXISTS (
    SELECT FROM oncebox.feed_position p WHERE p.relay = %(relay)s AND NOT p.topics @> %(topics)s::text[]
);

-- name: await_reconciliation
-- One that is just storing its mark has done so, or sees the fence that we raise.
SELECT pg_advisory_xact_lock(hashtext('oncebox reconcile'));

-- name: forget_verified
-- Of the reconciliation's, if it has ever run.
DELETE FROM oncebox.reconciliation_verified WHERE relay = %(relay)s;

-- name: hold_letters
SELECT FROM oncebox.dead_letter WHERE relay = %(relay)s AND state IN ('parked', 'held', 'queued') ORDER BY id FOR UPDATE;

-- name: forget_topics
-- Positions of other incarnations, letters that nobody can replay any more, and those of which all is read again. (A
-- transaction that wrote other topics too stays parked: its letters have all of it.)
WITH gone AS (
    DELETE FROM oncebox.position p USING oncebox.source s
    WHERE p.relay = %(relay)s AND p.source = s.source AND s.topic = ANY(%(topics)s)
      AND NOT s.topic_id = ANY(%(topic_ids)s::uuid[])
)
UPDATE oncebox.dead_letter SET state = 'discarded', resolved_at = now()
WHERE relay = %(relay)s AND state IN ('parked', 'held', 'queued') AND unit IN (
    SELECT l.unit FROM oncebox.dead_letter l JOIN oncebox.source s USING (source)
    WHERE l.relay = %(relay)s AND l.state IN ('parked', 'held', 'queued')
    GROUP BY l.unit
    HAVING bool_and(s.topic = ANY(%(topics)s))
        OR bool_or(s.topic = ANY(%(topics)s) AND NOT s.topic_id = ANY(%(topic_ids)s::uuid[]))
);

-- name: reset_position
-- The row stays, so that its fence only ever rises.
UPDATE oncebox.position SET start_offset = %(offset)s, next_offset = %(offset)s, high_offset = %(offset)s,
       applied_beyond = '{}', record_at = NULL, fence = fence + 1, updated_at = now()
WHERE relay = %(relay)s AND source = %(source)s;

-- name: forget_table
DELETE FROM oncebox.tombstone WHERE target_table = %(table)s;

-- name: list_letters
SELECT l.id, l.unit, l.state, s.topic, s.partition, l.record_offset, l.transactional_id, l.number, l.error, l.parked_at,
       l.key, l.value
FROM oncebox.dead_letter l JOIN oncebox.source s USING (source)
WHERE l.relay = %(relay)s AND l.state = ANY(%(states)s) ORDER BY l.id LIMIT %(limit)s;

-- name: queue_letters
UPDATE oncebox.dead_letter l SET state = 'queued'
WHERE l.relay = %(relay)s AND l.state = 'parked'
  AND (%(id)s::bigint IS NULL OR l.unit = (SELECT unit FROM oncebox.dead_letter WHERE id = %(id)s));

-- name: fix_letter
UPDATE oncebox.dead_letter SET value = %(value)s
WHERE relay = %(relay)s AND id = %(id)s AND state IN ('parked', 'queued');

-- name: discard_letter
UPDATE oncebox.dead_letter l SET state = 'discarded', resolved_at = now()
WHERE l.relay = %(relay)s AND l.state IN ('parked', 'held', 'queued')
  AND l.unit = (SELECT unit FROM oncebox.dead_letter WHERE id = %(id)s);
