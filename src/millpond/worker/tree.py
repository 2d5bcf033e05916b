"""The processes of a command: which there are, and how they are ended. Only what the system itself tells.

On Linux a supervisor is a subreaper: whatever a command starts stays below it in the tree of processes, also what
forks away or begins a session of its own. /proc then shows all of it. Elsewhere (macOS) there is no such thing: only
the command's own process group is found, and what leaves it is not.

What a command starts carries its environment. By that the leftovers of supervisors that were killed are found.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

LINUX: Final = sys.platform == "linux"
PROC: Final = "/proc"
STAT_BYTES: Final = 1_024  # more than a line of /proc/PID/stat has before the fields that count
LOOKS_MAX: Final = 10  # for processes that begin groups of their own: what goes on like that is killed later
END_PAUSE: Final = 0.01  # seconds between looks at a process, where nobody tells of its end
ENVIRONMENT_BYTES: Final = 4 << 20  # the system's own limit on arguments and environment is below it

ITEM, QUEUE, CORRELATION, RUN = b"MILLPOND_ITEM_ID", b"MILLPOND_QUEUE", b"MILLPOND_CORRELATION_ID", b"MILLPOND_RUN"
_RUN_NAME: Final = re.compile(rb"(\d{1,10})-(\d{1,20})-\d+")  # its supervisor, or worker, when that started, a number
_PR_SET_CHILD_SUBREAPER: Final = 36

Environment = Mapping[bytes, bytes]


class Process(NamedTuple):
    """`started` is in the system's ticks: of two processes with one id, the later has a larger one."""

    parent: int
    group: int
    zombie: bool = False
    started: int = 0
    stopped: bool = False


def adopt_orphans() -> None:
    """What processes below this one leave behind becomes its child, not that of init. Only on Linux."""
    if LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# ---- looking ----------------------------------------------------------------------------------------------


def _read(path: str, limit: int) -> bytes:
    """Empty for a process that has gone, or is not ours to look at."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while limit > 0 and (part := os.read(file, limit)):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(file)


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    except OSError:
        return []


def _fields(pid: int) -> list[bytes]:
    """Of /proc/PID/stat, from the state on: the name before it may hold anything."""
    text = _read(f"{PROC}/{pid}/stat", STAT_BYTES)
    return text[text.rfind(b")") + 2 :].split()


def processes() -> dict[int, Process]:
    found = {}
    for pid in _pids():
        if len(fields := _fields(pid)) > 19:
            state = fields[0]
            found[pid] = Process(int(fields[1]), int(fields[2]), state == b"Z", int(fields[19]), state in (b"T", b"t"))
    return found


def below(roots: Iterable[int], among: Mapping[int, Process], but: Iterable[int] = ()) -> list[int]:
    """The children of these, and theirs in turn; `but` for some, with all below them."""
    children: dict[int, list[int]] = {}
    for pid, process in among.items():
        children.setdefault(process.parent, []).append(pid)
    found, todo, skipped = [], list(roots), set(but)
    while todo:
        for child in children.pop(todo.pop(), ()):
            if child not in skipped:
                found.append(child)
                todo.append(child)
    return found


def started(pid: int) -> int:
    """As `Process.started`; 0 if there is none, or a zombie."""
    fields = _fields(pid)
    return int(fields[19]) if len(fields) > 19 and fields[0] != b"Z" else 0


# ---- ending what is below ---------------------------------------------------------------------------------


class Signalled(NamedTuple):
    """`refused` are those that this user may not signal: programs that run as somebody else."""

    living: list[int]
    refused: list[int]


def signal_below(root: int, number: int, but: Iterable[int] = ()) -> Signalled:
    """The living below `root`, each signalled with its whole group: a group cannot fork away from that.

    Looks again while there are new groups: one may begin a group of its own between the look and the signal.
    """
    own, told = os.getpgrp(), dict[int, bool]()
    living: list[int] = []
    for _ in range(LOOKS_MAX):
        among = processes()
        living = [pid for pid in below([root], among, but) if not among[pid].zombie]
        # one that has not yet begun its session is in our own group
        targets = {pid: pid if among[pid].group == own else -among[pid].group for pid in living}
        new = set(targets.values()) - told.keys()
        told |= {target: _send(target, number) for target in new}
        if not new:
            return Signalled(living, [pid for pid in living if not told[targets[pid]]])
    return Signalled(living, [])


def signal_group(group: int, number: int) -> bool:
    """False if nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of zombies
        return False
    return True


def _send(target: int, number: int) -> bool:
    try:
        os.kill(target, number)
        if number == signal.SIGTERM:
            os.kill(target, signal.SIGCONT)  # what is stopped ends only when it goes on
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


# ---- ending what was left by those who are gone --------------------------------------------------------------


def environment_of(pid: int) -> Environment:
    text = _read(f"{PROC}/{pid}/environ", ENVIRONMENT_BYTES)
    if RUN not in text:
        return {}
    return dict([pair.partition(b"=")[::2] for pair in text.split(b"\0")])


def supervisor_name() -> str:
    """Names this process in the environments of what it runs, so that others can tell whether it still lives."""
    return f"{os.getpid()}-{started(os.getpid())}"


def of_item(queue: str, item_id: str, correlation_id: str) -> Callable[[int, Environment], bool]:
    """Processes of earlier deliveries of this item. The correlation id tells it from one of the same id elsewhere."""
    wanted = {QUEUE: queue.encode(), ITEM: item_id.encode(), CORRELATION: correlation_id.encode()}
    return lambda pid, environment: wanted.items() <= environment.items()


def unsupervised(pid: int, environment: Environment) -> bool:
    """Whether its supervisor was killed, and all who would have ended it: seen from the same namespace of ids."""
    run = _RUN_NAME.fullmatch(environment[RUN])
    if run is None or namespace(pid) != namespace(os.getpid()):
        return False
    return started(int(run[1])) != int(run[2])


def namespace(pid: int) -> str:
    """Of process ids."""
    try:
        return os.readlink(f"{PROC}/{pid}/ns/pid")
    except OSError:
        return ""


def end_leftovers(wanted: Callable[[int, Environment], bool], patience: float) -> list[int]:
    """Kills these processes and all below them, until none is left. Returns those that could not be ended in time."""
    until = time.monotonic() + patience
    while held := _stop_all(wanted):
        for one in held.values():
            one.send(signal.SIGKILL)
        _wait(held.values(), until)
        if time.monotonic() >= until:
            return sorted(_leftovers(wanted, ()))
    return []


def kill_all(found: Mapping[int, Process], patience: float) -> None:
    """These very processes, and waits so long for their ends."""
    held = [one for pid, process in found.items() if (one := _hold(pid, process)) is not None]
    for one in held:
        one.send(signal.SIGKILL)
    _wait(held, time.monotonic() + patience)


def _stop_all(wanted: Callable[[int, Environment], bool]) -> dict[int, Held]:
    """By their ids, each stopped: so none can start another, or lose its parent, while the rest is found."""
    held: dict[int, Held] = {}
    for _ in range(LOOKS_MAX):
        new = {pid: process for pid, process in _leftovers(wanted, held).items() if pid not in held}
        for pid, process in new.items():
            if (one := _hold(pid, process)) is not None:
                held[pid] = one
                one.send(signal.SIGSTOP)
        if not new:
            break
    return held


def _leftovers(wanted: Callable[[int, Environment], bool], known: Iterable[int]) -> dict[int, Process]:
    """Those that are wanted, and those below them and below the ones that are known."""
    own, among = os.getpid(), processes()
    living = {pid: process for pid, process in among.items() if pid != own and not process.zombie}
    roots = [pid for pid in living if (environment := environment_of(pid)) and wanted(pid, environment)]
    found = {*roots, *below([*roots, *known], among, but=[own])}
    return {pid: process for pid, process in living.items() if pid in found}


class Held(NamedTuple):
    """This very process, not another that has its number by now. `handle` as `handle_of` has it."""

    pid: int
    started: int
    handle: int

    @property
    def living(self) -> bool:
        return started(self.pid) == self.started

    def send(self, number: int) -> None:
        try:
            if self.handle >= 0:
                signal.pidfd_send_signal(self.handle, number)
            elif self.living:
                os.kill(self.pid, number)
        except OSError:  # it has gone, or runs as another user
            pass

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


def handle_of(pid: int) -> int | None:
    """A file that becomes readable when the process has ended. None: it has gone. -1: there are no such files.

    So it is before Linux 5.3, in containers that do not allow it, and with a Python that was built on such a system.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except (AttributeError, OSError):
        return -1


def _hold(pid: int, process: Process) -> Held | None:
    """None: it has gone."""
    if (handle := handle_of(pid)) is None:
        return None
    held = Held(pid, process.started, handle)
    if held.living:
        return held
    held.close()
    return None


def _wait(held: Iterable[Held], until: float) -> None:
    """For their ends, and closes them."""
    poll = select.poll()
    left = {one.handle for one in held if one.handle >= 0}
    for handle in left:
        poll.register(handle, select.POLLIN)
    while left and (now := time.monotonic()) < until:
        for handle, _ in poll.poll((until - now) * 1_000):
            poll.unregister(handle)
            left.discard(handle)
    while time.monotonic() < until and any(one.handle < 0 and one.living for one in held):
        time.sleep(END_PAUSE)
    for one in held:
        one.close()
