-- Every statement of store/postgres.py. `-- name:` opens one; the line under it says what it is for. Names are found by
-- the connection's search_path, which is the schema of the store alone.

-- name: schema_1
-- Version 1 of a schema begins here: which steps were taken, one row.
CREATE TABLE version (version integer NOT NULL);
-- A row a partition. `epoch` grows with every takeover; `place` stands for the partition in the other tables.
CREATE TABLE owner (
    place integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    incarnation text NOT NULL,
    partition integer NOT NULL,
    epoch bigint NOT NULL,
    UNIQUE (incarnation, partition)
);
-- Items, packed as a producing turn wrote them.
CREATE TABLE chunk (
    place integer NOT NULL, first bigint NOT NULL, count bigint NOT NULL, body bytea NOT NULL,
    PRIMARY KEY (place, first)
);
-- What an item gathers on its way.
CREATE TABLE doc (place integer NOT NULL, number bigint NOT NULL, body bytea NOT NULL, PRIMARY KEY (place, number));
-- The partition's state after a turn: the newest row.
CREATE TABLE snapshot (place integer NOT NULL, turn bigint NOT NULL, state bytea NOT NULL, PRIMARY KEY (place, turn));
-- A row a turn. `total` is the bytes of events of this row and of all before it.
CREATE TABLE journal (
    place integer NOT NULL,
    turn bigint NOT NULL,
    at bigint NOT NULL,
    ended_lo bigint,
    ended_hi bigint,
    total bigint NOT NULL,
    events bytea NOT NULL,
    PRIMARY KEY (place, turn)
);
-- Finds the turns that may have ended an item without reading the journal.
CREATE INDEX journal_ended ON journal (place, at, turn, ended_lo, ended_hi) WHERE ended_lo IS NOT NULL;
-- Bodies are long and packed already: out of line, and no time spent on compressing them.
ALTER TABLE chunk ALTER body SET STORAGE EXTERNAL;
-- The same for documents.
ALTER TABLE doc ALTER body SET STORAGE EXTERNAL;
-- The same for states.
ALTER TABLE snapshot ALTER state SET STORAGE EXTERNAL;
-- The same for events.
ALTER TABLE journal ALTER events SET STORAGE EXTERNAL;
-- What comes and goes is vacuumed before a fifth of a long backlog is dead rows.
ALTER TABLE chunk SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
-- The same for the journal, which is trimmed from its oldest end.
ALTER TABLE journal SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);

-- Makes the caller the owner: it waits for commits under way, and those that come later with an older epoch are refused.
-- The clock keeps epochs apart that were given out by two servers, should a failover have forgotten a takeover.
CREATE FUNCTION take_over(an_incarnation text, a_partition integer, OUT a_place integer, OUT an_epoch bigint)
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO owner (incarnation, partition, epoch) VALUES (an_incarnation, a_partition, 0) ON CONFLICT DO NOTHING;
    SELECT place INTO a_place FROM owner WHERE incarnation = an_incarnation AND partition = a_partition;
    PERFORM pg_advisory_xact_lock('owner'::regclass::oid::integer, a_place);
    UPDATE owner SET epoch = greatest(epoch + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
        WHERE place = a_place RETURNING epoch INTO an_epoch;
    IF an_epoch IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'MP003', MESSAGE = 'the partition was destroyed while it was opened';
    END IF;
END $$;

-- Writes a turn, all of it or nothing, and returns the oldest turn that the journal still has. Each statement in here sees
-- what was committed before it began (read committed), so the epoch that is read after the lock is the one that counts.
CREATE FUNCTION commit_turn(
    a_place integer, an_epoch bigint, a_number bigint, an_at bigint, a_total bigint, an_events bytea,
    an_ended bigint[],      -- none or two: low, high
    chunk_firsts bigint[], chunk_counts bigint[], chunk_bodies bytea[], chunk_drops bigint[],
    doc_numbers bigint[], doc_bodies bytea[], doc_drops bigint[],
    a_snapshot bytea[],     -- none or one
    earlier_snapshot bigint,
    a_trim bigint[],        -- none or four: before_at, keep_bytes, keep_from, rows at most
    an_oldest bigint,
    is_relaxed boolean
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    stays bigint;
BEGIN
    PERFORM pg_advisory_xact_lock_shared('owner'::regclass::oid::integer, a_place);
    PERFORM FROM owner WHERE place = a_place AND epoch = an_epoch;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'MP001', MESSAGE = 'another process has taken the partition over';
    END IF;
    -- A server that crashed or a standby that took its place may have lost what was relaxed.
    IF a_number > 1 THEN
        PERFORM FROM journal WHERE place = a_place AND turn = a_number - 1;
        IF NOT FOUND THEN
            PERFORM FROM snapshot WHERE place = a_place AND turn = a_number - 1;
            IF NOT FOUND THEN
                RAISE EXCEPTION USING ERRCODE = 'MP002', MESSAGE = 'the turn before this one is not stored';
            END IF;
        END IF;
    END IF;
    IF is_relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    INSERT INTO journal VALUES (a_place, a_number, an_at, an_ended[1], an_ended[2], a_total, an_events);
    -- New chunks, and those that replace one. Unnested in FROM, large ones would go through a temporary file.
    IF cardinality(chunk_firsts) > 0 THEN
        INSERT INTO chunk SELECT a_place, unnest(chunk_firsts), unnest(chunk_counts), unnest(chunk_bodies)
            ON CONFLICT (place, first) DO UPDATE SET count = excluded.count, body = excluded.body;
    END IF;
    -- Drops come after writes: what a turn both writes and drops is gone.
    IF cardinality(chunk_drops) > 0 THEN
        DELETE FROM chunk WHERE place = a_place AND first = ANY (chunk_drops);
    END IF;
    IF cardinality(doc_numbers) > 0 THEN
        INSERT INTO doc SELECT a_place, unnest(doc_numbers), unnest(doc_bodies)
            ON CONFLICT (place, number) DO UPDATE SET body = excluded.body;
    END IF;
    IF cardinality(doc_drops) > 0 THEN
        DELETE FROM doc WHERE place = a_place AND number = ANY (doc_drops);
    END IF;
    -- The state after this turn in place of the earlier one.
    IF cardinality(a_snapshot) > 0 THEN
        INSERT INTO snapshot VALUES (a_place, a_number, a_snapshot[1]);
        DELETE FROM snapshot WHERE place = a_place AND turn = earlier_snapshot;
    END IF;
    -- Trim up to the first row that is to stay. From the oldest that the owner knows of: to look for it would be to walk
    -- over all the rows that vacuum has not removed yet.
    IF cardinality(a_trim) > 0 THEN
        SELECT turn INTO stays FROM journal
            WHERE place = a_place AND turn >= an_oldest AND turn < an_oldest + a_trim[4] AND turn <= a_trim[3]
                AND at >= a_trim[1] AND total - length(events) >= a_total - a_trim[2]
            ORDER BY turn LIMIT 1;
        stays := coalesce(stays, least(an_oldest + a_trim[4], a_trim[3] + 1));
        DELETE FROM journal WHERE place = a_place AND turn >= an_oldest AND turn < stays;
        RETURN greatest(an_oldest, stays);
    END IF;
    RETURN an_oldest;
END $$;

-- name: session
-- How a connection of ours works, whatever the server's defaults. The plans are lookups by key, for ever.
SELECT set_config('search_path', %s, false), set_config('statement_timeout', %s, false),
    set_config('lock_timeout', %s, false), set_config('default_transaction_isolation', 'read committed', false),
    set_config('synchronous_commit',
        CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false),
    set_config('plan_cache_mode', 'force_generic_plan', false), set_config('enable_seqscan', 'off', false),
    set_config('jit', 'off', false);

-- name: schema_lock
-- One at a time brings a database up to date.
SELECT pg_advisory_xact_lock(hashtext('millpond schema'));

-- name: schema_there
-- Whether the schema exists, and whether it has tables of ours.
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = %(schema)s),
    EXISTS (SELECT FROM pg_tables WHERE schemaname = %(schema)s AND tablename = 'version');

-- name: version
-- Steps taken so far.
SELECT version FROM version;

-- name: set_version
-- After the steps are taken.
WITH gone AS (DELETE FROM version) INSERT INTO version VALUES (%s);

-- name: take_over
-- Become the owner of a partition.
SELECT a_place, an_epoch FROM take_over(%b, %b);

-- name: end_holders
-- End the connections whose commits keep a takeover waiting: their process is gone, or hangs.
SELECT pg_terminate_backend(pid) FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND classid = 'owner'::regclass::oid
        AND objid = (SELECT place FROM owner WHERE incarnation = %s AND partition = %s)::oid;

-- name: commit
-- Write a turn in one round trip.
SELECT commit_turn(%b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b);

-- name: one_view
-- What recovery reads belongs together.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY;

-- name: snapshot
-- The state to start from.
SELECT turn, state FROM snapshot WHERE place = %s ORDER BY turn DESC LIMIT 1;

-- name: journal_after
-- Rows after a turn, in order: what recovery replays.
SELECT turn, at, events FROM journal WHERE place = %s AND turn > %s ORDER BY turn;

-- name: journal_ends
-- The oldest turn that there is, and bytes of events ever journalled, as the newest row knows it.
SELECT (SELECT min(turn) FROM journal WHERE place = %(place)s),
    (SELECT total FROM journal WHERE place = %(place)s ORDER BY turn DESC LIMIT 1);

-- name: journal_page
-- A page of the journal: what history reads.
SELECT turn, at, events FROM journal WHERE place = %s AND turn > %s ORDER BY turn LIMIT %s;

-- name: journal_rows
-- The rows of turns that journal_ended found.
SELECT turn, at, events FROM journal WHERE place = %s AND turn = ANY (%s) ORDER BY at DESC, turn DESC;

-- name: journal_ended
-- Turns since an instant that may have ended items of a span, the newest first; read from the index.
SELECT turn FROM journal
    WHERE place = %s AND ended_lo IS NOT NULL AND at >= %s AND ended_lo <= %s AND ended_hi >= %s
    ORDER BY at DESC, turn DESC;

-- name: read
-- Bodies of chunks (0) and documents (1).
SELECT 0, first, body FROM chunk WHERE place = %(place)s AND first = ANY (%(chunks)s)
UNION ALL
SELECT 1, number, body FROM doc WHERE place = %(place)s AND number = ANY (%(docs)s);

-- name: size
-- Bytes that a partition has stored, without reading them.
SELECT coalesce((SELECT sum(length(body)) FROM chunk WHERE place = owner.place), 0)
        + coalesce((SELECT sum(length(body)) FROM doc WHERE place = owner.place), 0)
        + coalesce((SELECT sum(length(events)) FROM journal WHERE place = owner.place), 0)
        + coalesce((SELECT sum(length(state)) FROM snapshot WHERE place = owner.place), 0)
    FROM owner WHERE incarnation = %s AND partition = %s;

-- name: check_chunks
-- Chunks that lie over one another.
SELECT format('chunk %%s begins inside the chunk before it, which reaches to %%s', first, edge - 1)
    FROM (SELECT first, lag(first + count) OVER (ORDER BY first) AS edge FROM chunk WHERE place = %(place)s) AS chunks
    WHERE first < edge;

-- name: check_journal
-- Turns that are missing, and totals that do not add up.
WITH rows AS (
    SELECT turn, total, length(events) AS bytes, lag(turn) OVER before AS earlier, lag(total) OVER before AS earlier_total
        FROM journal WHERE place = %(place)s WINDOW before AS (ORDER BY turn)
), state AS (SELECT coalesce(max(turn), 0) AS turn FROM snapshot WHERE place = %(place)s)
SELECT format('journal turn %%s follows turn %%s', turn, earlier) FROM rows WHERE turn <> earlier + 1
UNION ALL
SELECT format('journal begins at turn %%s, but the snapshot is of turn %%s', min(rows.turn), state.turn)
    FROM rows, state GROUP BY state.turn HAVING min(rows.turn) > state.turn + 1
UNION ALL
SELECT format('journal ends at turn %%s, before the snapshot of turn %%s', max(rows.turn), state.turn)
    FROM rows, state GROUP BY state.turn HAVING max(rows.turn) < state.turn
UNION ALL
SELECT format('journal turn %%s has total %%s, which does not follow from the row before', turn, total)
    FROM rows WHERE total <> earlier_total + bytes;

-- name: incarnations
-- Queues that have something stored here.
SELECT DISTINCT incarnation FROM owner ORDER BY incarnation;

-- name: places
-- The partitions of a queue.
SELECT partition, place FROM owner WHERE incarnation = %s ORDER BY partition;

-- name: destroy_chunks
-- Some of a partition's chunks; repeated until there are none.
DELETE FROM chunk WHERE place = %(place)s
    AND first IN (SELECT first FROM chunk WHERE place = %(place)s ORDER BY first LIMIT %(limit)s);

-- name: destroy_docs
-- Some of its documents.
DELETE FROM doc WHERE place = %(place)s
    AND number IN (SELECT number FROM doc WHERE place = %(place)s ORDER BY number LIMIT %(limit)s);

-- name: destroy_journal
-- Some of its journal.
DELETE FROM journal WHERE place = %(place)s
    AND turn IN (SELECT turn FROM journal WHERE place = %(place)s ORDER BY turn LIMIT %(limit)s);

-- name: destroy_snapshots
-- Its state.
DELETE FROM snapshot WHERE place = %(place)s
    AND turn IN (SELECT turn FROM snapshot WHERE place = %(place)s ORDER BY turn LIMIT %(limit)s);

-- name: destroy_owner
-- The partition itself, last: until then a destruction that was cut short can be found and repeated.
DELETE FROM owner WHERE place = %s;
