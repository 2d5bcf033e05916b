"""Lease tokens that are mangled, stale or of another queue are refused, and those beside them take effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from millpond import Pond, Retry
from millpond.errors import InvalidRequest, LeaseLost
from tests.service.case import Case, assert_good_form
from tests.service.looks import picture


def each_call_with_tokens(pond: Pond, leases: list[Any], queue: str | None) -> Iterator[list[Any]]:
    yield list(pond.complete(leases, queue=queue))
    yield list(pond.retry(leases, queue=queue))
    yield list(pond.retry([Retry(lease=lease, dead=True) for lease in leases], queue=queue))
    yield list(pond.extend(leases, queue=queue))
    yield list(pond.extend(leases, queue=queue, lease_timeout=0))


@pytest.mark.parametrize("queue", ["q", None])
def test_mangled_tokens_are_refused_and_nothing_is_acted_on(queue: str | None, case: Case) -> None:
    """What still looks like a token may be one of a queue that is gone: that lease is lost."""
    token = case.leased.lease
    mangled = [token[:place] + ("0" if char != "0" else "1") + token[place + 1 :] for place, char in enumerate(token)]
    mangled += [token[:-1], token[1:], token + "0", token + ".x", f" {token}", token.upper(), token[::-1], token * 2]
    mangled += ["", ".", "x", "\0", "\ud800", token.replace(".", ""), token + "\ud800", "x" * 1_000_000]
    mangled += [token[:9] + " " + token[10:], token[:9] + "\u0660" * (len(token) - 9)]
    before = picture(case.pond)
    for results in each_call_with_tokens(case.pond, mangled, queue):
        assert [result.ok for result in results] == [False] * len(mangled)
        assert {result.error.code for result in results} == {"invalid", "lease_lost"}
        assert all(re.fullmatch(r"[^;]+; [^;]+", result.error.message) for result in results)
    for one in mangled:
        with pytest.raises((InvalidRequest, LeaseLost)) as caught:
            case.pond.write_state(one, "doc", version=0, queue=queue)
        assert_good_form(caught.value)
    assert picture(case.pond) == before


@pytest.mark.parametrize("queue", ["kept", None])
def test_stale_tokens_are_lost_and_nothing_is_acted_on(queue: str | None, case: Case) -> None:
    before = picture(case.pond)
    for results in each_call_with_tokens(case.pond, [case.lost, case.lost.lease], queue):
        assert [result.error.code for result in results] == ["lease_lost"] * 2
        assert {result.correlation_id for result in results} == {case.lost.correlation_id}
    with pytest.raises(LeaseLost) as caught:
        case.pond.write_state(case.lost, "doc", version=0, queue=queue)
    assert_good_form(caught.value)
    assert caught.value.status == 409
    assert picture(case.pond) == before


def test_tokens_of_another_queue_are_refused(case: Case) -> None:
    before = picture(case.pond)
    for results in each_call_with_tokens(case.pond, [case.leased, case.leased.lease], "letters"):
        assert [result.error.code for result in results] == ["lease_lost"] * 2
    with pytest.raises(LeaseLost):
        case.pond.write_state(case.leased, "doc", version=0, queue="letters")
    assert picture(case.pond) == before


@pytest.mark.parametrize("bad_first", [True, False])
@pytest.mark.parametrize("queue", ["q", None])
def test_good_tokens_take_effect_beside_bad_ones(queue: str | None, bad_first: bool, case: Case) -> None:
    leases = ["mangled", case.leased.lease] if bad_first else [case.leased.lease, "mangled"]
    results = case.pond.complete(leases, queue=queue)
    assert [result.ok for result in results] == [not bad_first, bad_first]
    assert case.pond.get_item("q", case.leased.id).state == "completed"


def test_tokens_of_several_queues_go_each_to_its_own(case: Case) -> None:
    [other] = case.pond.lease("kept")
    results = case.pond.complete([other, "mangled", case.leased, case.lost.lease])
    assert [result.ok for result in results] == [True, False, True, False]
    assert [result.error and result.error.code for result in results] == [None, "invalid", None, "lease_lost"]
    assert [result.correlation_id for result in results][:3:2] == [other.correlation_id, case.leased.correlation_id]


def test_a_token_of_a_kind_of_string_is_a_token(case: Case) -> None:
    class Token(str):
        pass

    assert [one.ok for one in case.pond.extend([Token(case.leased.lease)])] == [True]
    assert [one.ok for one in case.pond.complete([Token(case.leased.lease), Token("x")])] == [True, False]
