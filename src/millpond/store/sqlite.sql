-- Every statement of store/sqlite.py and store/sqlite_registry.py. `-- name:` opens one; the line under it says what it is for.

-- name: partition_1
-- Version 1 of a partition's file begins here: items, packed as a producing turn wrote them.
CREATE TABLE chunk (first INTEGER PRIMARY KEY, count INTEGER NOT NULL, body BLOB NOT NULL);
-- What an item gathers on its way.
CREATE TABLE doc (number INTEGER PRIMARY KEY, body BLOB NOT NULL);
-- The partition's state after a turn: one row.
CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), turn INTEGER NOT NULL, state BLOB NOT NULL);
-- A row a turn. `total` is the bytes of events of this row and of all before it; `events` is last, so that
-- the small columns are read without it.
CREATE TABLE journal (
    turn INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    ended_lo INTEGER,
    ended_hi INTEGER,
    total INTEGER NOT NULL,
    events BLOB NOT NULL
);
-- Finds the turns that may have ended an item without reading the journal.
CREATE INDEX journal_ended ON journal (at, ended_lo, ended_hi) WHERE ended_lo IS NOT NULL;

-- name: partition_2
-- Version 2 has bodies that came in bulk, in files of their own: where they lie. See store/bulk.py.
CREATE TABLE bulk (
    first INTEGER PRIMARY KEY,
    count INTEGER NOT NULL,
    file INTEGER NOT NULL,
    place INTEGER NOT NULL,
    bytes INTEGER NOT NULL
);

-- name: partition_3
-- Version 3 has a log of turns beside it, which the tables may lack: who does not know it must not open the file.

-- name: registry_1
-- Version 1 of the registry's file: `definition` is a QueueDefinition in MessagePack.
CREATE TABLE queue (name TEXT PRIMARY KEY, definition BLOB NOT NULL) WITHOUT ROWID;

-- name: registry_2
-- Version 2 adds what was done to queues by hand: `entry` is an AuditEntry in MessagePack.
CREATE TABLE audit (number INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT NOT NULL, entry BLOB NOT NULL);
-- The entries of a queue, in order.
CREATE INDEX audit_queue ON audit (queue, number);
-- Nothing of it is changed,
CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'audit entries stay'); END;
-- nor removed.
CREATE TRIGGER audit_is_not_removed BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'audit entries stay'); END;
-- Incarnations of queues that were deleted: what is left of them in any store can go.
CREATE TABLE gone (incarnation TEXT PRIMARY KEY) WITHOUT ROWID;

-- name: registry_3
-- Version 3 has rebalances in the definitions of queues: who does not know them must not write these.

-- name: turn
-- One INSERT into this view writes a whole turn: one call, one transaction. Of the connection, not of the file.
CREATE TEMP VIEW turn AS SELECT
    NULL AS number, NULL AS at, NULL AS ended_lo, NULL AS ended_hi, NULL AS total, NULL AS events,
    NULL AS chunks,         -- JSON: [[first, count], ...]; with place in other_bodies from 1, and bytes, of those in there
    NULL AS body_0, NULL AS body_1, NULL AS body_2, NULL AS body_3,
    NULL AS body_4, NULL AS body_5, NULL AS body_6, NULL AS body_7,
    NULL AS body_8, NULL AS body_9, NULL AS body_10, NULL AS body_11,
    NULL AS body_12, NULL AS body_13, NULL AS body_14, NULL AS body_15,
    NULL AS other_bodies,   -- those of the chunks after the sixteenth, one after the other
    NULL AS chunk_drops,    -- JSON: [first, ...]
    NULL AS extents,        -- JSON: [[first, count, file, place, bytes], ...], of chunks whose bodies lie in bulk
    NULL AS extent_drops,   -- JSON: [first, ...]
    NULL AS docs,           -- JSON: [[number, place in doc_bodies from 1, bytes], ...]
    NULL AS doc_bodies,
    NULL AS doc_drops,      -- JSON: [number, ...]
    NULL AS snapshot,
    NULL AS trim_before_at, NULL AS trim_keep_bytes, NULL AS trim_keep_from, NULL AS trim_rows_max,
    NULL AS earlier,        -- JSON: [[turn, at, ended_lo, ended_hi, total, place in earlier_events from 1, bytes], ...]
    NULL AS earlier_events;
-- What the INSERT does; a column that is NULL does nothing.
CREATE TEMP TRIGGER turn_commit INSTEAD OF INSERT ON turn BEGIN
    -- The turns that it is one with.
    INSERT INTO journal
        SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4,
            coalesce(substr(new.earlier_events, value ->> 5, value ->> 6), x'') -- of nothing it makes NULL
        FROM json_each(new.earlier) WHERE new.earlier IS NOT NULL;
    -- And itself.
    INSERT INTO journal VALUES (new.number, new.at, new.ended_lo, new.ended_hi, new.total, new.events);
    -- New chunks, and those that replace one.
    INSERT OR REPLACE INTO chunk
        SELECT value ->> 0, value ->> 1, CASE key
            WHEN 0 THEN new.body_0 WHEN 1 THEN new.body_1 WHEN 2 THEN new.body_2 WHEN 3 THEN new.body_3
            WHEN 4 THEN new.body_4 WHEN 5 THEN new.body_5 WHEN 6 THEN new.body_6 WHEN 7 THEN new.body_7
            WHEN 8 THEN new.body_8 WHEN 9 THEN new.body_9 WHEN 10 THEN new.body_10 WHEN 11 THEN new.body_11
            WHEN 12 THEN new.body_12 WHEN 13 THEN new.body_13 WHEN 14 THEN new.body_14 WHEN 15 THEN new.body_15
            ELSE substr(new.other_bodies, value ->> 2, value ->> 3) END
        FROM json_each(new.chunks) WHERE new.chunks IS NOT NULL;
    -- Drops come after writes: what a turn both writes and drops is gone.
    DELETE FROM chunk
        WHERE new.chunk_drops IS NOT NULL AND first IN (SELECT value FROM json_each(new.chunk_drops));
    -- Where bodies lie in bulk: in place of the chunk, if there was one.
    DELETE FROM chunk
        WHERE new.extents IS NOT NULL AND first IN (SELECT value ->> 0 FROM json_each(new.extents));
    -- The new ones.
    INSERT OR REPLACE INTO bulk
        SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4
        FROM json_each(new.extents) WHERE new.extents IS NOT NULL;
    -- Those that go, or whose chunk is among the others now.
    DELETE FROM bulk
        WHERE new.extent_drops IS NOT NULL AND first IN (SELECT value FROM json_each(new.extent_drops));
    -- Documents, in the same way.
    INSERT OR REPLACE INTO doc
        SELECT value ->> 0, coalesce(substr(new.doc_bodies, value ->> 1, value ->> 2), x'')
        FROM json_each(new.docs) WHERE new.docs IS NOT NULL;
    -- Documents that go.
    DELETE FROM doc
        WHERE new.doc_drops IS NOT NULL AND number IN (SELECT value FROM json_each(new.doc_drops));
    -- The state after this turn.
    INSERT OR REPLACE INTO snapshot
        SELECT 1, new.number, new.snapshot WHERE new.snapshot IS NOT NULL;
    -- Trim up to the first row that is to stay. Turns have no gaps: counting them from the oldest counts rows.
    DELETE FROM journal WHERE new.trim_keep_from IS NOT NULL AND turn < coalesce(
        (SELECT turn FROM journal
            WHERE turn < (SELECT min(turn) FROM journal) + new.trim_rows_max AND turn <= new.trim_keep_from
                AND at >= new.trim_before_at AND total - length(events) >= new.total - new.trim_keep_bytes
            ORDER BY turn LIMIT 1),
        min((SELECT min(turn) FROM journal) + new.trim_rows_max, new.trim_keep_from + 1));
    -- End of the trigger.
END;

-- name: plain_turn
-- The same for a turn that has one chunk at most and drops a few, and nothing else: reading the JSON of a `turn` would
-- take a tenth of its time.
CREATE TEMP VIEW plain_turn AS SELECT
    NULL AS number, NULL AS at, NULL AS ended_lo, NULL AS ended_hi, NULL AS total, NULL AS events,
    NULL AS first, NULL AS count, NULL AS body,
    NULL AS drop_0, NULL AS drop_1, NULL AS drop_2, NULL AS drop_3;
-- What the INSERT does.
CREATE TEMP TRIGGER plain_turn_commit INSTEAD OF INSERT ON plain_turn BEGIN
    INSERT INTO journal VALUES (new.number, new.at, new.ended_lo, new.ended_hi, new.total, new.events);
    -- The chunk, if there is one.
    INSERT OR REPLACE INTO chunk SELECT new.first, new.count, new.body WHERE new.first IS NOT NULL;
    -- The drops, which come after the write here too. The first of them by itself, for mostly it is the only one:
    DELETE FROM chunk WHERE first = new.drop_0;
    -- a list takes longer to look through.
    DELETE FROM chunk WHERE new.drop_1 IS NOT NULL AND first IN (new.drop_1, new.drop_2, new.drop_3);
    -- End of the trigger.
END;

-- name: commit
-- Write a turn, all of it or nothing: the columns are those of the view.
INSERT INTO turn VALUES (
    ?, ?, ?, ?, ?, ?, ?,
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
);

-- name: commit_plain
-- The same for a plain one.
INSERT INTO plain_turn VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: pages
-- Pages of the file as the log has it, and how many of them are unused.
SELECT page_count, freelist_count FROM pragma_page_count, pragma_freelist_count;

-- name: log_size
-- A transaction that changes nothing: SQLite's log says then how large the database is.
PRAGMA application_id = 0;

-- name: snapshot
-- The state to start from.
SELECT turn, state FROM snapshot;

-- name: journal_after
-- Rows after a turn, in order: what recovery replays.
SELECT turn, at, events FROM journal WHERE turn > ? ORDER BY turn;

-- name: journal_page
-- The same, a page at a time: what history reads.
SELECT turn, at, events FROM journal WHERE turn > ? ORDER BY turn LIMIT ?;

-- name: journal_row
-- One row, for a turn that journal_ended found.
SELECT turn, at, events FROM journal WHERE turn = ?;

-- name: journal_total
-- Bytes of events ever journalled, as the newest row knows it.
SELECT coalesce((SELECT total FROM journal ORDER BY turn DESC LIMIT 1), 0);

-- name: last_turn
-- The newest turn that is stored.
SELECT max(coalesce((SELECT max(turn) FROM journal), 0), coalesce((SELECT turn FROM snapshot), 0));

-- name: journal_ended
-- Turns since an instant that may have ended items of a span, the newest first; read from the index alone.
SELECT turn FROM journal INDEXED BY journal_ended
    WHERE ended_lo IS NOT NULL AND at >= ?1 AND ended_lo <= ?3 AND ended_hi >= ?2 ORDER BY at DESC, turn DESC;

-- name: read_chunks
-- Bodies of the chunks in a JSON array.
SELECT first, body FROM chunk WHERE first IN (SELECT value FROM json_each(?));

-- name: read_docs
-- Documents of the items in a JSON array.
SELECT number, body FROM doc WHERE number IN (SELECT value FROM json_each(?));

-- name: extents
-- Where the bodies lie that came in bulk.
SELECT first, count, file, place, bytes FROM bulk;

-- name: check_chunks
-- Chunks that lie over one another, those in bulk among them.
SELECT format('chunk %d begins inside the chunk before it, which reaches to %d', first, edge - 1)
    FROM (SELECT first, lag(first + count) OVER (ORDER BY first) AS edge
        FROM (SELECT first, count FROM chunk UNION ALL SELECT first, count FROM bulk))
    WHERE first < edge;

-- name: check_journal
-- Turns that are missing, and totals that do not add up.
SELECT format('journal turn %d follows turn %d', turn, earlier)
    FROM (SELECT turn, lag(turn) OVER (ORDER BY turn) AS earlier FROM journal) WHERE turn <> earlier + 1
UNION ALL
SELECT format('journal begins at turn %d, but the snapshot is of turn %d', least, state_turn)
    FROM (SELECT min(turn) AS least, coalesce((SELECT turn FROM snapshot), 0) AS state_turn FROM journal)
    WHERE least > state_turn + 1
UNION ALL
SELECT format('journal ends at turn %d, before the snapshot of turn %d', most, state_turn)
    FROM (SELECT max(turn) AS most, coalesce((SELECT turn FROM snapshot), 0) AS state_turn FROM journal)
    WHERE most < state_turn
UNION ALL
SELECT format('journal turn %d has total %d, which does not follow from the row before', turn, total)
    FROM (SELECT turn, total, length(events) AS bytes, lag(total) OVER (ORDER BY turn) AS earlier FROM journal)
    WHERE total <> earlier + bytes;

-- name: registry_load
-- All queues.
SELECT definition FROM queue ORDER BY name;

-- name: registry_put
-- Write rows in one commit: a JSON array of [name, place in the bodies from 1, bytes], and the bodies.
INSERT OR REPLACE INTO queue
    SELECT value ->> 0, substr(?2, value ->> 1, value ->> 2) FROM json_each(?1);

-- name: registry_remove
-- Forget a queue.
DELETE FROM queue WHERE name = ?;

-- name: registry_gone_add
-- Remember which one it was.
INSERT OR IGNORE INTO gone VALUES (?);

-- name: registry_gone
-- Those of a JSON array that were deleted.
SELECT incarnation FROM gone WHERE incarnation IN (SELECT value FROM json_each(?));

-- name: audit_add
-- Add entries: a JSON array of [queue, place in the bodies from 1, bytes], and the bodies.
INSERT INTO audit (queue, entry)
    SELECT value ->> 0, substr(?2, value ->> 1, value ->> 2) FROM json_each(?1) ORDER BY key;

-- name: audit_page
-- Entries of a queue before a number (NULL: from the newest), the newest first.
SELECT number, entry FROM audit WHERE queue = ?1 AND (?2 IS NULL OR number < ?2) ORDER BY number DESC LIMIT ?3;
