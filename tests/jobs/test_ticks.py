"""When schedules are due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest

from millpond.errors import InvalidRequest
from millpond.jobs.ticks import Cron, Every, Ticks, missed, next_after, zone


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def ticks(of: Ticks, after: str, count: int) -> list[str]:
    return [f"{tick:%m-%d %H:%M}" for tick in islice(of.after(at(after)), count)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("99 * * * *", "bad minute"),
        ("* 24 * * *", "bad hour"),
        ("* * * * * *", "has 6 fields"),
        ("* * * *", "has 4 fields"),
        ("", "has 0 fields"),
        ("0 0 30 2 *", "never comes"),
        ("0 0 31 4,6,9,11 *", "never comes"),
        ("0 0 32 * *", "bad day-of-month"),
        ("*/0 * * * *", "bad minute"),
        ("5-1 * * * *", "bad minute"),
        ("a b c d e", "bad minute"),
        ("* * * * 9", "bad day-of-week"),
        ("* " * 600, "short text"),
    ],
)
def test_absurd_cron_lines_are_refused_with_what_is_wrong(line: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Cron(line)


def test_names_stand_for_cron_lines() -> None:
    assert ticks(Cron("@daily"), "2026-01-01 00:00", 2) == ["01-02 00:00", "01-03 00:00"]


def test_a_rare_date_is_found() -> None:
    assert next_after(Cron("0 0 29 2 *"), at("2025-01-01")) == at("2028-02-29")


def test_what_falls_into_a_skipped_hour_runs_right_after_it_and_once() -> None:
    berlin = Cron("30 2 * * *", "Europe/Berlin")  # clocks go from 2 to 3 on 29 March 2026
    assert ticks(berlin, "2026-03-27 12:00", 3) == ["03-28 01:30", "03-29 01:00", "03-30 00:30"]


def test_an_hour_that_comes_twice_runs_a_fixed_time_once_and_an_interval_through() -> None:
    fixed, often = Cron("30 2 * * *", "Europe/Berlin"), Cron("*/30 * * * *", "Europe/Berlin")
    assert ticks(fixed, "2026-10-24 12:00", 2) == ["10-25 00:30", "10-26 01:30"]
    assert ticks(often, "2026-10-24 23:59", 5) == [
        f"10-25 {at}" for at in ("00:00", "00:30", "01:00", "01:30", "02:00")
    ]


@pytest.mark.parametrize("line", ["30 2 * * *", "*/20 * * * *", "15 1-3 * * *"])
@pytest.mark.parametrize("begin", ["2026-03-28 20:00", "2026-10-24 20:00"])
def test_one_tick_after_the_other_is_what_all_at_a_time_are(line: str, begin: str) -> None:
    cron, tick, chain = Cron(line, "Europe/Berlin"), at(begin), []
    for _ in range(30):
        following = next_after(cron, tick)
        assert following is not None
        assert following > tick
        tick = following
        chain.append(tick)
    assert chain == list(islice(cron.after(at(begin)), 30))


@pytest.mark.parametrize("name", ["Mars/Phobos", "", "../../etc/passwd", "/etc/localtime", "x" * 1000, "a\0b"])
def test_an_unknown_time_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no time zone"):
        zone(name)


def test_utc_needs_no_time_zone_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoneinfo import ZoneInfoNotFoundError

    def none_there(name: str) -> object:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr("millpond.jobs.ticks.ZoneInfo", none_there)
    assert zone("UTC") is UTC
    with pytest.raises(InvalidRequest, match="install the package tzdata"):
        zone("Europe/Berlin")


def test_an_interval_does_not_drift() -> None:
    every = Every(90, at("2026-01-01 00:00"))
    assert next_after(every, at("2026-01-01 00:00")) == at("2026-01-01 00:01:30")
    assert next_after(every, at("2026-01-01 01:00:07")) == at("2026-01-01 01:01:30")
    assert next_after(every, at("2025-01-01 00:00")) == at("2026-01-01 00:00")


@pytest.mark.parametrize("seconds", [0, 0.5, -3, 1e9])
def test_an_interval_out_of_bounds_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="every is"):
        Every(seconds, at("2026-01-01"))


@pytest.mark.parametrize("of", [Cron("* * * * *"), Every(60, at("2000-01-01"))])
def test_the_newest_of_very_many_missed_ticks_are_found_quickly(of: Ticks) -> None:
    now = at("2026-01-01 00:00:30")
    found, more = missed(of, at("2001-01-01"), now, 3)
    assert (found[-1], more) == (at("2026-01-01 00:00"), True)
    assert found[0] == found[-1] - timedelta(minutes=2)
    assert missed(of, at("2026-01-01 00:00"), now, 3) == ([], False)
    assert missed(of, at("2025-12-31 23:58"), now, 3) == (found[1:], False)
