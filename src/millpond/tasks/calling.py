"""One attempt of a task, from what was leased to its outcome. Whoever runs tasks runs them through here."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import msgspec

from millpond.errors import InvalidRequest
from millpond.jobs.names import KINDS, TASK
from millpond.jobs.spec import MSGPACK, JobSpec, decode
from millpond.model import STATE_DOC_BYTES_MAX, LeasedItem
from millpond.tasks.arguments import Arguments
from millpond.tasks.connection import Connection
from millpond.tasks.context import Context, reset_current, set_current
from millpond.tasks.errors import GiveUp, Interrupted, RetryLater, WrongArguments
from millpond.tasks.numbers import odd_number
from millpond.tasks.text import sendable
from millpond.worker.executors import DONE, Outcome, Running

if TYPE_CHECKING:
    from millpond.tasks.declared import Declared

log = logging.getLogger("millpond.tasks")

INTERRUPTED: Final = Outcome(ok=False, error="interrupted")  # who interrupts it knows why
GROUP_MAX: Final = 5  # errors of a group that are told: the log has them all
GROUP_CHARS_MAX: Final = 300  # of each
WORDS_CHARS_MAX: Final = 2_000  # of an error: less than is kept, so that the place is kept too
_SMALL_INT: Final = 1 << 63  # beyond it not every store can say it


class Runs(Protocol):
    """A task, or the handler of a queue's plain items (it has no arguments: it is given the item)."""

    function: Callable[..., Any]
    arguments: Arguments | None


class Found(Protocol):
    """What can be run here: the tasks by name, the handlers by queue. An App is one."""

    @property
    def tasks(self) -> Mapping[str, Any]: ...

    @property
    def consumers(self) -> Mapping[str, Any]: ...

    @property
    def schedules(self) -> Mapping[str, Declared]: ...

    @property
    def connection(self) -> Connection: ...


def found_for(found: Found, job: Running) -> Any:
    """The task or consumer that the job is for; None: there is none here."""
    if job.spec is not None:
        return None if job.spec.task is None else found.tasks.get(job.spec.task)
    return None if job.item.kind in KINDS else found.consumers.get(job.queue)


def timeout_of(found: Found, job: Running) -> float | None:
    """Of a job it goes with the job; of a consumer's item it is the consumer's."""
    timeout: float | None = found_for(found, job).timeout if job.spec is None else job.spec.timeout
    return timeout


def spec_of(item: LeasedItem) -> JobSpec | None:
    """The job that an item is. What is none is an item for a consumer, or dies of it."""
    if item.kind not in KINDS:
        return None
    try:
        return decode(item.payload, item.encoding)
    except InvalidRequest:
        return None


class Refused(Exception):
    """The job cannot be begun; its outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


def perform(found: Found, context: Context, spec: JobSpec | None, leave: Callable[[], None] | None = None) -> Outcome:
    """In the calling thread. `leave` is called when the function has ended: what follows must not be interrupted."""
    before = set_current(context)
    try:
        run, args, kwargs = prepared(found, context, spec)
        process = os.getpid()
        try:
            try:
                result = run.function(*args, **kwargs)
            finally:
                if os.getpid() != process:
                    end_fork()
        except Exception as error:
            if leave is not None:
                leave()
            return failed(error, context)
        if leave is not None:
            leave()
        return finished(result, context)
    except Refused as refused:
        return refused.outcome
    except Interrupted:
        return INTERRUPTED
    except BaseException as error:  # a task may well exit
        return failed(error, context)
    finally:
        reset_current(before)


async def perform_async(found: Found, context: Context, spec: JobSpec | None) -> Outcome:
    """On the calling loop, in a task of its own. A cancellation is INTERRUPTED."""
    set_current(context)
    try:
        run, args, kwargs = prepared(found, context, spec)
        process = os.getpid()
        try:
            result = await run.function(*args, **kwargs)
        finally:
            if os.getpid() != process:
                end_fork()
        return finished(result, context)
    except Refused as refused:
        return refused.outcome
    except (asyncio.CancelledError, Interrupted):
        return INTERRUPTED
    except BaseException as error:
        return failed(error, context)


# ---- before -----------------------------------------------------------------------------------------------


def prepared(found: Found, context: Context, spec: JobSpec | None) -> tuple[Runs, Sequence[Any], Mapping[str, Any]]:
    """What to call and with what. Arguments that do not fit will not fit the next time: such a job is dead."""
    if spec is None:
        return _handler(found, context), (context.item,), {}
    if spec.task is None or (task := found.tasks.get(spec.task)) is None:
        raise Refused(Outcome(ok=False, error=f"task {spec.task!r:.200} is not registered here; look at the app"))
    try:
        args, kwargs = task.arguments.convert(spec.args, spec.kwargs, context.item.encoding, context)
    except WrongArguments as error:
        raise Refused(Outcome(ok=False, dead=True, error=str(error))) from None
    return task, args, kwargs


def _handler(found: Found, context: Context) -> Runs:
    if context.item.kind == TASK:
        raise Refused(Outcome(ok=False, dead=True, error="the payload is not a job; enqueue it again"))
    run: Runs | None = found.consumers.get(context.queue)
    if run is None:
        raise Refused(Outcome(ok=False, error=f"the app has no consumer for {context.queue}; look at the app"))
    return run


# ---- after ------------------------------------------------------------------------------------------------


def end_fork() -> NoReturn:
    """For a process that a task has forked and that came back from the task: the job is its parent's, and goes on."""
    error = sys.exc_info()[1]
    code: object = error.code if isinstance(error, SystemExit) else error
    if code is not None and not isinstance(code, int):
        traceback.print_exception(error)
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(int(code or 0) & 0xFF)


def finished(result: Any, context: Context) -> Outcome:
    """A result that cannot be kept is the end of the job: it has run, and another run would end no better."""
    if result is None:
        return DONE
    if isinstance(result, bool) or (type(result) is int and -_SMALL_INT <= result < _SMALL_INT):
        return Outcome(ok=True, result=result)
    try:
        kept = stored(result, context.item.encoding)
        size = len(msgspec.msgpack.encode(kept))
    except OverflowError:
        why = "the task is done, but its result has a whole number beyond 64 bits; return it as text"
        return Outcome(ok=False, dead=True, error=why)
    except (TypeError, ValueError, RecursionError) as error:
        why = f"the task is done, but its result cannot be kept ({error}); return JSON values"
        return Outcome(ok=False, dead=True, error=why)
    if size > STATE_DOC_BYTES_MAX:
        why = f"the task is done, but its result has {size} bytes, over {STATE_DOC_BYTES_MAX}; store it elsewhere"
        return Outcome(ok=False, dead=True, error=why)
    return Outcome(ok=True, result=kept)


def stored(result: Any, encoding: str) -> Any:
    """As plain values; MessagePack has bytes too. Where a result is kept there is no NaN, whatever its encoding."""
    packed = encoding == MSGPACK
    sent = b"null" if packed else msgspec.json.encode(result)
    if b"null" in sent and (odd := odd_number(result)) is not None:
        raise ValueError(f"it has {odd}, which is no JSON number")
    return msgspec.to_builtins(result, builtin_types=(bytes,), str_keys=True) if packed else msgspec.json.decode(sent)


def failed(error: BaseException, context: Context) -> Outcome:
    """Does not raise, whatever the error is like and whoever listens to the log: its thread has other jobs to run."""
    try:
        if isinstance(error, RetryLater):
            return Outcome(ok=False, error=_words(error), delay=error.delay)
        if isinstance(error, GiveUp):
            return Outcome(ok=False, error=_words(error), dead=True)
        _log(error, context)
        return Outcome(ok=False, error=told(error))
    except Exception as another:
        return Outcome(ok=False, error=f"{type(error).__name__}; to tell it failed with {type(another).__name__}")


def _log(error: BaseException, context: Context) -> None:
    what = context.task or f"the consumer of {context.queue}"
    try:
        log.warning("%s failed: job %s, attempt %d", what, context.id, context.attempt, exc_info=error)
    except Exception:  # of a handler that the app has added
        pass


def _words(error: BaseException) -> str:
    try:
        return sendable(str(error)[:WORDS_CHARS_MAX])
    except Exception:
        return "<exception str() failed>"  # as Python says it


def told(error: BaseException) -> str:
    """The error in words, and the place in the task that it came from. Of a group: also the errors in it."""
    words = _named(error, WORDS_CHARS_MAX)
    if isinstance(error, BaseExceptionGroup):
        return "\n".join([words, *map(_one_of_many, islice(_leaves(error), GROUP_MAX))])
    frames = traceback.extract_tb(error.__traceback__)
    return words if len(frames) < 2 else f"{words}\n  {_place(frames[-1])}"  # the first is ours


def _one_of_many(error: BaseException) -> str:
    words = _named(error, GROUP_CHARS_MAX)
    frames = traceback.extract_tb(error.__traceback__)
    return f"  {words}, {_place(frames[-1])}" if frames else f"  {words}"


def _named(error: BaseException, chars_max: int) -> str:
    return sendable("".join(traceback.format_exception_only(error)).strip()[:chars_max])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _place(frame: traceback.FrameSummary) -> str:
    return f"at {sendable(frame.filename)}:{frame.lineno} in {frame.name}"
