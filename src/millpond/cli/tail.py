"""`millpond tail`: what happens to a queue's items, as it happens, from the journal. Nothing is leased by looking."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments, Subparsers, add_command, whole
from millpond.cli.output import DONE, print_json, print_json_line, say
from millpond.cli.pond import on_pond, runs_on_pond
from millpond.cli.text import one_line, payload_text, short

if TYPE_CHECKING:
    from millpond.api import Api
    from millpond.history.reader import Transition

LOOK_S = 0.2  # between looks at the journal: a person sees it at once, and the engine does not notice
LAST = 10  # events from before, as tail has it
BACK_TURNS = 20_000  # read from before, at most: own ids are told where an item is produced, and nowhere else
PAGE = 500  # rows of the journal at a time
NEW = ("produced", "arrived", "published", "adopted")

EXAMPLES = """\
  millpond tail orders                             the last 10 events, then what happens, until Ctrl-C
  millpond tail orders -n 0 --payload              what arrives from now on, with what is in it
  millpond tail orders -n 100 --once               what has happened, and end
  millpond tail jobs --id nightly-report
  millpond tail orders --json | jq .why            an object a line; with --once one array

Of an item that was produced long ago the derived id is shown in place of its own. On a server this needs
the role operator.
"""


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "tail", "follow what happens in a queue", EXAMPLES)
    verb.add_argument("queue", metavar="QUEUE")
    verb.add_argument("-n", "--last", type=whole(0), default=LAST, metavar="N", help=f"events from before ({LAST})")
    verb.add_argument("--once", action="store_true", help="end after those")
    verb.add_argument("--id", help="only of this item")
    verb.add_argument("--payload", action="store_true", help="show what new items carry")
    runs_on_pond(verb, tail)


def tail(asked: Arguments) -> int:
    return on_pond(asked, lambda pond: _tail(pond, asked), listen=not asked.once)


async def _tail(pond: Api, asked: Arguments) -> int:
    lanes = await _lanes(pond, asked.queue)
    shown = _Shown(pond, asked)
    before: deque[Transition] = deque(maxlen=asked.last)
    before.extend(sorted([one for lane in lanes for one in await lane.read() if shown.wants(one)], key=_order))
    if asked.once and asked.json:
        print_json([await shown.event(one) for one in before])
        return DONE
    for one in before:
        await shown.show(one)
    if not asked.once:
        say(f"following {asked.queue}; end with Ctrl-C")
    while not asked.once:
        await asyncio.sleep(LOOK_S)
        for one in sorted([one for lane in lanes for one in await lane.read() if shown.wants(one)], key=_order):
            await shown.show(one)
    return DONE


def _order(one: Transition) -> tuple[int, int, int]:
    return one.at, one.partition, one.turn


async def _lanes(pond: Api, queue: str) -> list[_Lane]:
    info = await pond.queue_info(queue)
    lanes = [_Lane(pond, queue, info.incarnation, one.partition) for one in info.partitions]
    for lane in lanes:
        await lane.begin()
    return lanes


class _Lane:
    """The journal of one partition, from where we are."""

    def __init__(self, pond: Api, queue: str, incarnation: str, partition: int) -> None:
        from millpond.history.reader import Reader
        from millpond.queue.tokens import Mint

        self._pond = pond
        self._queue = queue
        self._partition = partition
        self._reader = Reader(partition, Mint(incarnation, partition))
        self._after = 0

    async def begin(self) -> None:
        page = await self._pond.read_journal(self._queue, partition=self._partition, limit=1)
        self._after = max(0, page.last_turn - BACK_TURNS)

    async def read(self) -> list[Transition]:
        from millpond.store.base import JournalRow

        found: list[Transition] = []
        while True:
            page = await self._pond.read_journal(self._queue, partition=self._partition, after=self._after, limit=PAGE)
            for row in page.rows:
                found += self._reader.read(JournalRow(row.turn, row.at, row.events))
            if not page.rows:
                return found
            self._after = page.rows[-1].turn


class _Shown:
    def __init__(self, pond: Api, asked: Arguments) -> None:
        self._pond = pond
        self._asked = asked

    def wants(self, one: Transition) -> bool:
        return self._asked.id is None or one.item_id == self._asked.id

    async def show(self, one: Transition) -> None:
        event = await self.event(one)
        if self._asked.json:
            print_json_line(event)
            return
        who = f"  by {one_line(one.who)}" if one.who else ""
        attempt = "" if one.attempt is None else f"  attempt {one.attempt}"
        text = f"  {one_line(short(event['payload']))}" if event.get("payload") is not None else ""
        at = f"{event['at']:%Y-%m-%d %H:%M:%S}.{one.at % 1000:03d}"
        print(f"{at}  {one.why:<14}  {one.item_id}  -> {one.to_state or 'removed'}{attempt}{who}{text}", flush=True)

    async def event(self, one: Transition) -> dict[str, Any]:
        from millpond.model import to_datetime

        event = {
            "at": to_datetime(one.at),
            "queue": self._asked.queue,
            "id": one.item_id,
            "why": one.why,
            "from": one.from_state,
            "to": one.to_state,
            "attempt": one.attempt,
            "who": one.who or None,
            "correlation_id": one.correlation_id,
        }
        return event | ({"payload": await self._payload(one)} if self._asked.payload else {})

    async def _payload(self, one: Transition) -> str | None:
        """None for an item that is not new, or is gone already."""
        from millpond.errors import NotFound

        if one.why not in NEW:
            return None
        try:
            return payload_text((await self._pond.get_item(self._asked.queue, one.item_id)).payload)
        except NotFound:
            return None
