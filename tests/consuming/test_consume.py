"""Loops over items: what completes them, what hands them back, and who keeps their leases meanwhile."""

from __future__ import annotations

import logging
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millpond import Item, Pond
from millpond.consuming.held import LEFT, HeldItem
from millpond.errors import Closed, InvalidRequest, LeaseLost, NotFound
from millpond.model import ERROR_CHARS_MAX
from tests.consuming.conftest import Open
from tests.service.looks import until_parked


def all_of(pond: Pond, queue: str) -> list[Item]:
    return list(pond.list_items(queue).items)


def only(pond: Pond, queue: str) -> Item:
    [item] = all_of(pond, queue)
    return item


def until_count(pond: Pond, queue: str, state: str, count: int) -> None:
    """Each look is a turn of the engine's loop, so this is no busy waiting for long."""
    while pond.stats(queue).counts.get(state, 0) != count:
        pass


# ---- completing -------------------------------------------------------------------------------------------


def test_asking_for_the_next_item_completes_the_one_before(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2", b"3"])
    seen = []
    for item in pond.consume(queue, batch=2, idle_timeout=0):
        seen.append((item.payload, len(all_of(pond, queue))))
    assert seen == [(b"1", 3), (b"2", 2), (b"3", 1)]
    assert all_of(pond, queue) == []


def test_what_the_body_finished_is_left_alone(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2"])
    for item in pond.consume(queue, idle_timeout=0):
        if item.payload == b"1":
            item.complete()
        else:
            item.retry("not now", delay="1h")
    assert only(pond, queue).last_error == "not now"


@pytest.mark.parametrize("words", ["no file \udcff", "x" * (17 << 20)], ids=["no Unicode", "no end"])
def test_a_failure_that_cannot_be_stored_as_it_is_ends_no_loop(
    pond: Pond, queue: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "millpond.consuming")  # what is logged as it is, no test runner can pass on

    def handle(item: HeldItem) -> None:
        raise OSError(words)

    pond.produce(queue, [b"1", b"2"])
    pond.consume(queue, handle, idle_timeout=0)
    assert pond.stats(queue).counts["retrying"] == 2
    errors = {item.last_error for item in all_of(pond, queue)}
    assert errors == {f"OSError: {words}".encode(errors="backslashreplace").decode()[:ERROR_CHARS_MAX]}


def test_a_with_in_the_loop_completes_and_fails_by_itself(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"good", b"bad"])
    with pytest.raises(ValueError, match="bad luck"):  # noqa: PT012
        for item in pond.consume(queue, idle_timeout=0):
            with item:
                if item.payload == b"bad":
                    raise ValueError("bad luck")
    left = only(pond, queue)
    assert (left.payload, left.state, left.last_error) == (b"bad", "retrying", "ValueError: bad luck")


def test_a_handler_is_given_every_item_and_its_errors_are_the_items(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2", b"3"])
    seen = []

    def handle(item: HeldItem) -> None:
        seen.append(item.payload)
        if item.payload == b"2":
            raise KeyError("two")

    pond.consume(queue, handle, idle_timeout=0)
    assert seen == [b"1", b"2", b"3"]
    assert only(pond, queue).last_error == "KeyError: 'two'"


# ---- leaving ----------------------------------------------------------------------------------------------


def leave_by_break(pond: Pond, queue: str) -> None:
    for _ in pond.consume(queue, batch=2):
        break


def leave_by_return(pond: Pond, queue: str) -> HeldItem:
    for item in pond.consume(queue, batch=2):
        return item
    raise AssertionError


def leave_by_error(pond: Pond, queue: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT012
        for _ in pond.consume(queue, batch=2):
            raise ValueError("seen by nobody here")


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_return, leave_by_error])
def test_a_plain_loop_that_is_left_hands_its_item_back_as_a_failure(pond: Pond, queue: str, leave: Any) -> None:
    pond.produce(queue, [b"in hand", b"leased ahead"])
    leave(pond, queue)
    until_count(pond, queue, "leased", 0)
    in_hand, ahead = sorted(all_of(pond, queue), key=lambda item: item.payload)
    assert (in_hand.state, in_hand.attempts, in_hand.last_error) == ("retrying", 1, LEFT)
    assert (ahead.state, ahead.attempts, ahead.last_error) == ("ready", 0, None)


def test_a_loop_in_a_with_that_is_broken_gives_the_attempt_back(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"x"])
    with pond.consume(queue) as items:
        for _ in items:
            break
    until_count(pond, queue, "ready", 1)
    assert only(pond, queue).attempts == 0


def test_a_loop_in_a_with_that_fails_tells_the_error(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"x"])
    with pytest.raises(ValueError), pond.consume(queue) as items:  # noqa: PT012
        for _ in items:
            raise ValueError("told")
    until_count(pond, queue, "retrying", 1)
    assert only(pond, queue).last_error == "ValueError: told"


def test_an_interrupt_is_not_the_items_fault(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"x"])
    with pytest.raises(KeyboardInterrupt), pond.consume(queue) as items:  # noqa: PT012
        for _ in items:
            raise KeyboardInterrupt
    until_count(pond, queue, "ready", 1)
    assert only(pond, queue).attempts == 0


def test_an_iterator_that_is_kept_by_its_traceback_is_left_when_it_is_dropped(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"x"])
    items = pond.consume(queue)
    try:
        for _ in items:
            raise ValueError
    except ValueError as error:
        assert pond.stats(queue).counts["leased"] == 1
        traceback.clear_frames(error.__traceback__)
    del items
    until_count(pond, queue, "retrying", 1)


def test_close_hands_back_before_it_returns(opened: Open, queue: str) -> None:
    with opened() as pond:
        pond.produce(queue, [b"x"])
        next(pond.consume(queue))
    with opened() as pond:
        assert only(pond, queue).state == "retrying"


def test_stop_ends_a_waiting_loop_at_once_and_leases_nothing_more(pond: Pond, queue: str) -> None:
    consumer = pond.consume(queue, wait="10m")
    seen: list[HeldItem] = []
    thread = threading.Thread(target=lambda: seen.extend(consumer))
    thread.start()
    until_parked(pond, queue)
    consumer.stop()
    thread.join(10)
    assert not thread.is_alive()
    while pond.stats(queue).waiters:  # a server may learn of it a moment later
        pass
    pond.produce(queue, [b"x"])
    assert seen == []
    assert pond.stats(queue).counts["ready"] == 1


def test_a_loop_ends_with_its_pond(opened: Open, queue: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        with opened() as pond:
            pond.produce(queue, [b"x"])
            loop = threads.submit(pond.consume, queue, lambda _: None, wait="10m")
            until_parked(pond, queue)
        assert isinstance(loop.exception(timeout=10), Closed)


def test_a_loop_on_no_queue_fails_at_once(pond: Pond) -> None:
    with pytest.raises(NotFound):
        next(pond.consume("nowhere"))


@pytest.mark.parametrize("name", ["wait", "idle_timeout", "lease_timeout"])
def test_what_is_no_duration_is_refused_at_once(pond: Pond, queue: str, name: str) -> None:
    options: Any = {name: "soon"}
    with pytest.raises(InvalidRequest):
        pond.consume(queue, **options)


# ---- with item --------------------------------------------------------------------------------------------


def test_with_item_completes_only_by_word(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2"])
    one, two = pond.lease(queue, batch=2)
    with one:
        one.complete()
    with two:
        pass
    left = only(pond, queue)
    assert (left.payload, left.state, left.last_error) == (b"2", "retrying", LEFT)


def test_with_item_retries_with_the_error_and_a_delay(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"x"])
    [item] = pond.lease(queue)
    item.retry_delay = "1h"
    with pytest.raises(ValueError), item:
        raise ValueError("no")
    left = only(pond, queue)
    assert left.last_error == "ValueError: no"
    assert left.enqueue_at is not None
    assert (left.enqueue_at - left.created_at).total_seconds() > 3_000


def test_an_item_whose_lease_is_over_says_so(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"x"])
    [item] = pond.lease(queue)
    pond.complete([item])
    with pytest.raises(LeaseLost):
        item.retry()
    assert item.lost
    assert item.finished


def test_an_item_writes_its_state_again_and_again(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"x"])
    [item] = pond.lease(queue)
    item.write_state({"step": 1})
    item.write_state({"step": 2})
    assert (item.state_doc, item.state_version) == ({"step": 2}, 2)
    pond.cancel(queue, [item.id])
    item.extend("5m")
    assert item.cancelled
    assert not item.finished


# ---- leases in the background -----------------------------------------------------------------------------


def test_the_lease_is_extended_while_the_body_runs(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1", b"2"])
    with pond.consume(queue, batch=2, lease_timeout="1s") as items:
        item = next(items)
        until_extended(pond, queue, item)
        assert not item.lost
    until_count(pond, queue, "ready", 2)


def test_the_lease_is_extended_while_a_with_has_it(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1"])
    [item] = pond.lease(queue, lease_timeout="1s")
    with item:
        until_extended(pond, queue, item)
        item.complete()
    assert all_of(pond, queue) == []


def until_extended(pond: Pond, queue: str, item: HeldItem) -> None:
    while (now := pond.get_item(queue, item.id).lease_deadline) is None or now <= item.lease_deadline:
        assert not item.lost


def test_a_lost_lease_is_told(pond: Pond, queue: str) -> None:
    pond.produce(queue, [b"1"])
    [item] = pond.lease(queue, lease_timeout="200ms")
    pond.extend([item], lease_timeout=0)
    with item:
        while not item.lost:
            pond.stats(queue)
    assert only(pond, queue).deliveries == 1
