"""Files of the lake as version 1 wrote them: they must stay readable for ever.

`python -m tests.history.test_golden` made them, from the golden journal. A new version gets files of its own beside
them; those that were released are never made again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from millpond.history.durable import unwatched
from millpond.history.flatten import Flattener
from millpond.history.known import Columns, Known
from millpond.history.lake import ITEM_EVENT_SCHEMA, Lake, read_about
from millpond.history.lane_export import LaneExport
from millpond.history.progress import Progress, list_bookmarks
from millpond.model import JournalTurn
from tests.history.told import tell

GOLDEN = Path(__file__).parent / "golden"
JOURNAL = GOLDEN.parent.parent / "golden" / "journal-v1.json"
LANE = ("incq", 0)


def journal() -> list[JournalTurn]:
    rows = json.loads(JOURNAL.read_text())["queues"]["q"]["rows"]
    return [JournalTurn(turn, at, bytes.fromhex(events)) for turn, at, events in rows]


def test_a_data_file_of_version_1_reads_as_it_always_did() -> None:
    path = GOLDEN / "events-v1.parquet"
    about = read_about(pq.read_metadata(path))
    rows = pq.read_table(path).to_pylist()
    assert rows == tell(journal(), LANE[0])
    assert pq.read_schema(path).equals(ITEM_EVENT_SCHEMA)
    assert (about.version, about.queue, about.from_turn, about.to_turn) == (1, "q", 1, journal()[-1].turn)
    assert sum(about.counts.values()) == len(rows)


def test_a_bookmark_of_version_1_tells_what_it_always_told(tmp_path: Path) -> None:
    turn = journal()[-1].turn
    lake = Lake(tmp_path)
    lake.state.mkdir()
    shutil.copy(GOLDEN / "bookmark-v1.known", lake.state / f"incq-p00000-{turn:012d}.known")
    progress = Progress(lake, LANE, newest=turn)
    progress.load(Known(), list_bookmarks(lake)[LANE])
    assert progress.turn == turn
    assert progress.known is not None
    flattener = Flattener(*LANE)
    for row in journal():
        flattener.read(row.turn, row.at, row.events)
    list(flattener.drain())
    numbers = np.arange(1, 200)
    numbers = numbers[flattener.known.look(numbers).states > 0]
    mine, wanted = progress.known.look(numbers), flattener.known.look(numbers)
    for name in Columns.__slots__:
        if name != "facts":
            assert getattr(mine, name).tolist() == getattr(wanted, name).tolist()
    facts = [progress.known.facts.get(place) for place in mine.facts.tolist()]
    assert facts == [flattener.known.facts.get(place) for place in wanted.facts.tolist()]
    assert any(facts)
    assert len(numbers) == np.count_nonzero(progress.known.look(np.arange(1, 200)).states) > 1


def write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake(folder)
        progress = Progress(lake, LANE, newest=0)
        progress.load(Known(), [])
        export = LaneExport(lake, LANE, "q", progress, 1_000_000, unwatched)
        export.take(journal())
        export.finish()
        GOLDEN.mkdir(exist_ok=True)
        [data], [bookmark] = lake.files(), list(lake.state.glob("*.known"))
        shutil.copy(data.path, GOLDEN / "events-v1.parquet")
        shutil.copy(bookmark, GOLDEN / "bookmark-v1.known")


if __name__ == "__main__":
    write()
