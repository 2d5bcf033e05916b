"""What can happen to an item, as a table: what `flatten` notes for many items at once.

An act goes by its place in the table, so that a column of rows is an array of acts, looked up in a row of places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.history.reader import Why
from millpond.model import DeadReason, State

STATES = list(State)
CODES = {None: 0} | {state: code for code, state in enumerate(STATES, 1)}  # 0 is no state
WHYS = list(Why)
HELD = (State.LEASED, State.CLAIMED)  # an attempt is under way


class Act(NamedTuple):
    """What happens to an item. `before` None: it is new, or what it was is looked up."""

    why: Why
    before: State | None
    after: State | None
    creates: bool = False
    attempt: bool = False  # one begins or ends
    counts: bool = False  # … and counts as over
    resets: bool = False
    ends: bool = False


_acts: list[Act] = []


def _place(act: Act) -> int:
    _acts.append(act)
    return len(_acts) - 1


PRODUCED = {
    (why, scheduled): _place(Act(why, None, State.SCHEDULED if scheduled else State.READY, creates=True))
    for why in (Why.PRODUCED, Why.ARRIVED, Why.PUBLISHED)
    for scheduled in (False, True)
}
LEASED = _place(Act(Why.LEASED, State.READY, State.LEASED, attempt=True))
COMPLETED = {
    (held, ends): _place(Act(Why.COMPLETED, held, State.COMPLETED, attempt=True, ends=ends))
    for held in HELD
    for ends in (False, True)
}
FAILED = {
    (held, waits): _place(Act(Why.FAILURE, held, State.RETRYING if waits else State.READY, attempt=True, counts=True))
    for held in HELD
    for waits in (False, True)
}
DEFERRED = {
    waits: _place(Act(Why.DEFER, State.LEASED, State.SCHEDULED if waits else State.READY, attempt=True))
    for waits in (False, True)
}
LEASE_EXPIRED = _place(Act(Why.LEASE_EXPIRED, State.LEASED, State.READY, attempt=True, counts=True))
RELEASED = _place(Act(Why.RELEASED, State.LEASED, State.READY, attempt=True))
DUE = _place(Act(Why.DUE, None, State.READY))
DIED = {
    (reason, state, ends): _place(
        Act(Why(reason), state, State.DEAD, attempt=state in HELD, counts=state in HELD, ends=ends)
    )
    for reason in DeadReason
    for state in STATES
    for ends in (False, True)
}
CANCELLED = {
    (state, ends): _place(Act(Why.CANCELLED, state, State.CANCELLED, attempt=state in HELD, ends=ends))
    for state in STATES
    for ends in (False, True)
}
CLEARED = {state: _place(Act(Why.CLEARED, state, None, ends=True)) for state in STATES}
REPLACED = {state: _place(Act(Why.REPLACED, state, None, ends=True)) for state in STATES}
REDRIVEN = _place(Act(Why.REDRIVEN, State.DEAD, State.READY, resets=True))
MOVING = {state: _place(Act(Why.REDRIVEN, state, State.DEAD)) for state in STATES}
PURGED = _place(Act(Why.RETENTION, None, None, ends=True))
MOVED = _place(Act(Why.MOVED, State.DEAD, None, ends=True))
CARRYING = {state: _place(Act(Why.MOVED, state, None, ends=True)) for state in STATES}
ADOPTED = {state: _place(Act(Why.ADOPTED, None, state, creates=True)) for state in STATES if state not in HELD}
KEPT = _place(Act(Why.KEPT, State.DEAD, State.READY))
CLAIMED = _place(Act(Why.CLAIMED, State.READY, State.CLAIMED, attempt=True))
UNCLAIMED = _place(Act(Why.CLAIM_RELEASED, State.CLAIMED, State.READY, attempt=True))


# ---- their parts, by place ----------------------------------------------------------------------------------


def _codes(part: Callable[[Act], int]) -> npt.NDArray[np.int8]:
    return np.array([part(act) for act in _acts], dtype=np.int8)


def _marks(part: Callable[[Act], Any]) -> npt.NDArray[np.bool_]:
    return np.array([part(act) for act in _acts], dtype=np.bool_)


WHY = _codes(lambda act: WHYS.index(act.why))
BEFORE = _codes(lambda act: CODES[act.before])
AFTER = _codes(lambda act: CODES[act.after])
CREATES = _marks(lambda act: act.creates)
LOOKED_UP = _marks(lambda act: act.before is None and not act.creates)
ATTEMPT = _marks(lambda act: act.attempt)
COUNTS = _marks(lambda act: act.counts)
RESETS = _marks(lambda act: act.resets)
ENDS = _marks(lambda act: act.ends)
PLAIN = _marks(lambda act: act.creates and act.after is State.READY)
