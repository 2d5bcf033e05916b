"""Removes what is dead, and nothing else: other items may wait beside the letters of a queue."""

from __future__ import annotations

from millpond.model import TOKEN_BATCH_MAX, State
from millpond.triage.dead import Calls, Dead, dead_items
from millpond.triage.redriving import in_batches


def purge(pond: Calls, dead: Dead) -> int:
    """How many were removed. What dies meanwhile may be among them."""
    removed = pond.clear(dead.queue, [State.DEAD]).get(State.DEAD, 0)
    if dead.letters:
        for letters in in_batches(dead_items(pond, dead), TOKEN_BATCH_MAX):
            results = pond.cancel(dead.queue, [letter.id for letter in letters])
            removed += sum(result.ok for result in results)
    return removed
