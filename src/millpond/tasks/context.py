"""What a task can know and say about the attempt that it is: `current()`, or a parameter annotated `Context`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

from millpond.errors import InvalidRequest
from millpond.model import LeasedItem
from millpond.tasks.text import sendable

PROGRESS: Final = "progress"  # the state document's key that is the context's, not the task's


class Notes(Protocol):
    """Where an attempt writes its state document. One write at a time; from any thread."""

    @property
    def doc(self) -> Any: ...

    @property
    def cancelled(self) -> bool: ...

    def progress(self, progress: dict[str, Any]) -> None:
        """Soon, and only the latest: nobody waits for it."""
        ...

    def write(self, state: Mapping[str, Any]) -> None: ...

    async def write_async(self, state: Mapping[str, Any]) -> None: ...

    def max_attempts(self) -> int | None: ...


class Context:
    """One attempt of a job. It belongs to the task that runs it, and is of no use once that has ended."""

    __slots__ = ("_item", "_notes", "_process", "queue", "task")

    def __init__(self, item: LeasedItem, queue: str, task: str | None, notes: Notes) -> None:
        self._item = item
        self._notes = notes
        self._process = os.getpid()
        self.queue = queue
        self.task = task

    @property
    def item(self) -> LeasedItem:
        return self._item

    @property
    def id(self) -> str:
        """The job's; it is the same in every attempt."""
        return self._item.id

    item_id = id

    @property
    def attempt(self) -> int:
        """1 for the first."""
        return self._item.attempts

    @property
    def max_attempts(self) -> int | None:
        """0 is no limit; None where the token may not look."""
        return self._writer().max_attempts()

    @property
    def fencing_token(self) -> int:
        """Grows with every attempt: what the task writes to can refuse an older one."""
        return self._item.fencing_token

    @property
    def correlation_id(self) -> str:
        """Goes on to the tasks that this one enqueues."""
        return self._item.correlation_id

    @property
    def cancelled(self) -> bool:
        """Nobody wants it done any more: a plain task in a thread that runs for long should look."""
        return self._notes.cancelled

    # ---- the state document ---------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """What this attempt or an earlier one last wrote: a copy; {} at first."""
        doc = _copied(self._notes.doc)
        if doc is None:
            return {}
        return {key: value for key, value in doc.items() if key != PROGRESS} if isinstance(doc, dict) else doc

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Durable on return, and there for the next attempt; gone when the job is completed."""
        self._writer().write(_checked(state))

    async def write_state_async(self, state: Mapping[str, Any]) -> None:
        await self._writer().write_async(_checked(state))

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """`progress(0.5)` or `progress(50, 100, "halfway")`: shown by `millpond job show`.

        It costs little, and may be called as often as one likes: what follows within half a second is one write.
        """
        if total is not None and not total > 0:
            raise InvalidRequest(f"total is {total!r:.60}; give a number above 0, or a fraction alone")
        done, total = _plain(done), None if total is None else _plain(total)
        shown: dict[str, Any] = {"fraction": round(min(1.0, max(0.0, done / (total or 1))), 4)}
        if total is not None:
            shown |= {"done": done, "total": total}
        if note:
            shown["note"] = sendable(str(note))[:NOTE_MAX]
        self._writer().progress(shown)

    def _writer(self) -> Notes:
        """Who writes them down is not there in a process that the task has forked."""
        if os.getpid() != self._process:
            raise InvalidRequest("this process was forked by the task; use the context where the task runs")
        return self._notes


NOTE_MAX: Final = 200  # characters: a line of a table


def _plain(number: float) -> float:
    """Whatever counts as a number, as JSON has it."""
    return number if type(number) is int else float(number)


def _checked(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy: what the task changes of it later was not written."""
    given: Any = state
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"the state is a {type(given).__name__}; give a dict")
    if PROGRESS in given:
        raise InvalidRequest(f"the state has the key {PROGRESS!r}, which is the progress; name it otherwise")
    try:
        return {key: _copied(value) for key, value in given.items()}
    except RecursionError:
        raise InvalidRequest("the state is nested too deeply; write less of it") from None


def _copied(value: Any) -> Any:
    """With all that can be changed in it, as JSON has it."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


_current: ContextVar[Context | None] = ContextVar("millpond_task", default=None)


def current() -> Context:
    """The context of the task that is calling."""
    context = _current.get()
    if context is None:
        raise InvalidRequest("no task is running here; call this from inside one")
    return context


def current_or_none() -> Context | None:
    return _current.get()


set_current = _current.set
reset_current = _current.reset
