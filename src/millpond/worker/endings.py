"""What the end of a command means to its job. No I/O."""

from __future__ import annotations

import os
import re
import signal
from typing import Any, Final

from millpond.worker.executors import Outcome
from millpond.worker.orders import LEASE_OVER, NO_ROOM, TIMED_OUT, WARDEN_GONE, WORKER_GONE, Report

NOT_FOUND: Final = 127  # what shells say of a command that there is not
LINE_CHARS_MAX: Final = 500  # of the output, in an error
NO_ROOM_DELAY: Final = 1.0  # seconds until a job is tried again for which the system had no room
_MISSING: Final = re.compile(r"([^:\s][^:]*): (?:command )?not found$")  # as dash and bash say it
_WHY: Final = {
    "cancelled": "cancelled while it ran",
    "stopping": "ended, because its worker stops",
    "lease_lost": "ended, because its lease was lost",
    LEASE_OVER: "ended, because its lease ran out",
    WARDEN_GONE: "ended, because its supervisor was killed",
    WORKER_GONE: "ended, because its worker died",
}


def outcome_of(report: Report, timeout: float | None, host: str) -> Outcome:
    if report.why == NO_ROOM:
        return no_room(report.problem or "no room")
    if report.why == TIMED_OUT:
        return _failed(report, f"timed out after {timeout or 0:g}s")
    if report.why is not None:
        return _failed(report, _WHY.get(report.why, report.why))
    if report.status is None:
        return Outcome(ok=False, error=report.problem or "the command could not be started")
    code = os.waitstatus_to_exitcode(report.status)
    if code == 0:
        return Outcome(ok=True, result=_result(report, code, host))
    return _failed(report, _what(code, text_of(report.last)))


def no_room(why: str) -> Outcome:
    """Nothing was executed, so no attempt is counted: the machine is to blame, not the job."""
    return Outcome(ok=False, error=why, defer=True, delay=NO_ROOM_DELAY)


def lost() -> Outcome:
    return Outcome(ok=False, error="the supervisor of the command was killed; what it ran was ended")


def _result(report: Report, code: int, host: str) -> dict[str, Any]:
    result = {
        "exit_code": code,
        "seconds": round(report.seconds, 3),
        "output": text_of(report.last),
        "log": report.log,
        "host": host,
    }
    problem = problem_of(report)
    return result if problem is None else {**result, "problem": problem}


def _failed(report: Report, what: str) -> Outcome:
    problem = problem_of(report)
    return Outcome(ok=False, error=what if problem is None else f"{what} ({problem})")


def problem_of(report: Report) -> str | None:
    """What is to be told besides the end itself."""
    if not report.left:
        return report.problem
    left = f"processes of it run as another user and could not be ended: {', '.join(map(str, report.left))}"
    return left if report.problem is None else f"{report.problem}; {left}"


def _what(code: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    line = lines[-1][:LINE_CHARS_MAX] if lines else ""
    if code < 0:
        return f"killed by {_name(-code)}"
    if code == NOT_FOUND:
        name = _MISSING.search(line)
        return f"command not found: {name[1] if name else line}" if line else "command not found"
    return f"exit code {code}: {line}" if line else f"exit code {code}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def text_of(output: bytes) -> str:
    """The end of it, which may begin in the middle of a character."""
    start = 0
    while start < min(3, len(output)) and output[start] & 0xC0 == 0x80:
        start += 1
    return output[start:].decode(errors="replace")
