"""SIGTERM and SIGINT for a worker: the first drains it, the second ends what runs."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Final, Protocol

from millpond.worker.boss import Reason

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)


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

    def take(self, worker: Ends) -> None:
        """Only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            self._taken = True
            for number in NUMBERS:
                asyncio.get_running_loop().add_signal_handler(number, self._signalled, worker)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # what was held for it

    def leave(self) -> None:
        """They do what they did before anybody took them."""
        if self._taken:
            self._taken = False
            for number in NUMBERS:
                asyncio.get_running_loop().remove_signal_handler(number)

    def hold(self) -> None:
        """Nothing is left to do but to end, or to become a fresh worker: that one gets what comes from now on."""
        self.leave()
        for number in NUMBERS:
            signal.signal(number, self._noted)
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)

    def _noted(self, *_: object) -> None:
        """One that another thread has taken."""
        self.count += 1

    def _signalled(self, worker: Ends) -> None:
        self.count += 1
        if self.count == 1:
            worker.drain("signal")
        else:
            worker.force("signal")
