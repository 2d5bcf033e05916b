"""SIGTERM, SIGINT and SIGHUP for a worker: the first drains it, the second ends what runs.

A terminal that is closed sends SIGHUP, and so does its shell: two are no wish for haste. Under nohup none counts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol
from weakref import WeakSet

from millpond.worker.boss import Reason

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEFAULTS: Final = {signal.SIGINT: signal.default_int_handler}  # Python's own; of the others the system's


class Ends(Protocol):
    def drain(self, reason: Reason = "stopped") -> None: ...

    def force(self, reason: Reason = "stopped") -> None: ...


class Signals:
    """Taken until the last of the work is done: one that comes while a worker ends must not turn that into a failure,
    and one that is about to be replaced must hear that it is to stop.
    """

    def __init__(self) -> None:
        self.count = 0
        self._taken = False
        _all.add(self)

    def take(self, worker: Ends) -> None:
        """Only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            self._taken = True
            for number in _heeded():
                asyncio.get_running_loop().add_signal_handler(number, self._signalled, worker, number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # what was held for it

    def leave(self) -> None:
        """They do what they did before anybody took them."""
        if self._taken:
            self._taken = False
            for number in _heeded():
                asyncio.get_running_loop().remove_signal_handler(number)

    def forget(self) -> None:
        """In a process that a job has forked: what it is sent is not for the worker, whose loop it would wake."""
        if self._taken:
            self._taken = False
            signal.set_wakeup_fd(-1)
            for number in _heeded():
                signal.signal(number, DEFAULTS.get(number, signal.SIG_DFL))

    def hold(self) -> None:
        """Nothing is left to do but to end, or to become a fresh worker: that one gets what comes from now on."""
        self.leave()
        for number in _heeded():
            signal.signal(number, self._noted)
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)

    def _noted(self, *_: object) -> None:
        """One that another thread has taken."""
        self.count += 1

    def _signalled(self, worker: Ends, number: int) -> None:
        self.count += 1
        if self.count == 1 or number == signal.SIGHUP:
            worker.drain("signal")
        else:
            worker.force("signal")


def _heeded() -> list[signal.Signals]:
    """All but the end of a terminal that the worker is to outlive."""
    return [number for number in NUMBERS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def let_go_in_forks(numbers: Iterable[signal.Signals], let_go: Callable[[], None]) -> None:
    """`let_go` is called in every process that is forked, before one of these signals can come to it."""
    thread = threading.local()

    def before() -> None:
        thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, thread.mask)

    def after_in_child() -> None:
        let_go()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


_all: WeakSet[Signals] = WeakSet()


def _forget_all() -> None:
    for signals in list(_all):
        signals.forget()


let_go_in_forks(NUMBERS, _forget_all)
