"""Plots as SVG, drawn by hand: no script, no colours of their own (the page's style has them, for light and dark)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 10, 24  # room for the labels
TICKS_WANTED = 4
LABELS_MAX = 8  # on the axis of time: more would touch each other
DAY_S = 86_400
TIME_STEPS_S = (
    60,
    300,
    900,
    1_800,
    3_600,
    10_800,
    21_600,
    43_200,
    *(days * DAY_S for days in (1, 2, 7, 14, 28, 91, 364)),
)

_S, _M, _H, _D = 1e3, 6e4, 3.6e6, 8.64e7
DURATIONS_MS = (1.0, 10.0, 100.0, _S, 10 * _S, _M, 10 * _M, _H, 10 * _H, _D, 10 * _D, 100 * _D, 1_000 * _D)

Show = Callable[[float], str]


class Series(NamedTuple):
    """`style` is the name of a class of the page's style. None: nothing was measured in that window."""

    name: str
    style: str
    values: Sequence[float | None]


class Scale(NamedTuple):
    """Values from `low` to `high` on the height of the plot, with lines across at the ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def y(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - (at - low) / (high - low)), 1)


# ---- scales -------------------------------------------------------------------------------------------------


def linear_scale(values: Sequence[float]) -> Scale:
    """From 0, or below, to a round number above the greatest."""
    low, high = min([0.0, *values]), max([0.0, *values])
    step = _round_step((high - low or TICKS_WANTED) / TICKS_WANTED)
    first, last = math.floor(low / step), max(math.ceil(high / step), 1)
    return Scale(first * step, last * step, tuple(place * step for place in range(first, last + 1)))


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * 0.999)


def duration_scale(values: Sequence[float]) -> Scale:
    """By powers, for ms: from a round duration below the values to one above. What is less than 1 is drawn at 1."""
    least, most = max(1.0, min(values, default=1.0)), max(1.0, *values, 1.0)
    first = max(place for place, tick in enumerate(DURATIONS_MS[:-1]) if tick <= least)
    last = min((place for place, tick in enumerate(DURATIONS_MS) if tick >= most), default=len(DURATIONS_MS) - 1)
    ticks = DURATIONS_MS[first : max(last, first + 1) + 1]
    return Scale(ticks[0], max(ticks[-1], most), ticks, log=True)


# ---- plots --------------------------------------------------------------------------------------------------


def plot(
    title: str,
    windows: Sequence[datetime],
    series: Sequence[Series],
    show: Show,
    scale_of: Callable[[Sequence[float]], Scale] = linear_scale,
) -> str:
    """Lines over time, with a legend above. Whoever points at a window sees its values."""
    scale = scale_of([value for one in series for value in one.values if value is not None])
    legend = "".join(f'<span class="{one.style}"><i></i>{escape(one.name)}</span>' for one in series)
    drawn = "".join((_ticks(scale, show), _times(windows), *(_line(one, len(windows), scale) for one in series)))
    return (
        f"<figure><figcaption>{escape(title)}<span class=legend>{legend}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{drawn}{_pointers(windows, series, show)}</svg></figure>"
    )


def _x(place: int, count: int) -> float:
    """The middle of a window's slot."""
    return round(LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / max(count, 1), 1)


def _ticks(scale: Scale, show: Show) -> str:
    return "".join(
        f'<line class="{"zero" if tick == 0 else "tick"}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{escape(show(tick))}</text>'
        for tick, y in ((tick, scale.y(tick)) for tick in scale.ticks)
    )


def _times(windows: Sequence[datetime]) -> str:
    """Where a round time is reached; the first of a day is told by its date."""
    step = _time_step(windows)
    labels = []
    for place, window in enumerate(windows):
        seconds = int(window.timestamp())
        before = int(windows[place - 1].timestamp()) if place else seconds - 1
        if seconds // step != before // step:
            new_day = seconds // DAY_S != before // DAY_S
            text = f"{window:%b} {window.day}" if new_day else f"{window:%H:%M}"
            labels.append(f'<text x="{_x(place, len(windows))}" y="{HEIGHT - 6}" text-anchor="middle">{text}</text>')
    return "".join(labels)


def _time_step(windows: Sequence[datetime]) -> int:
    length = (windows[-1] - windows[0]).total_seconds() if windows else 0.0
    return next((step for step in TIME_STEPS_S if length / step <= LABELS_MAX), int(length) or 1)


def _line(series: Series, count: int, scale: Scale) -> str:
    """Broken where nothing was measured; a value that stands alone is a dot."""
    drawn = []
    for run in _runs(series.values):
        points = [(_x(place, count), scale.y(value)) for place, value in run]
        if len(points) == 1:
            [(x, y)] = points
            drawn.append(f'<circle class="{series.style}" cx="{x}" cy="{y}" r="2.5"/>')
        else:
            path = " ".join(f"{x},{y}" for x, y in points)
            drawn.append(f'<polyline class="{series.style}" points="{path}"/>')
    return "".join(drawn)


def _runs(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    runs: list[list[tuple[int, float]]] = []
    last = None
    for place, value in enumerate(values):
        if value is not None:
            if last is None:
                runs.append([])
            runs[-1].append((place, value))
        last = value
    return runs


def _pointers(windows: Sequence[datetime], series: Sequence[Series], show: Show) -> str:
    """A slot for each window, seen only by who points at it, with the values as its tooltip."""
    count = len(windows)
    width = round((WIDTH - LEFT - RIGHT) / max(count, 1), 2)
    slots = []
    for place, window in enumerate(windows):
        values = ((one.name, one.values[place]) for one in series)
        told = "\n".join(f"{name}: {'-' if value is None else show(value)}" for name, value in values)
        slots.append(
            f'<rect class="slot" x="{round(LEFT + place * width, 1)}" y="{TOP}" width="{width}"'
            f' height="{HEIGHT - TOP - BOTTOM}"><title>{window:%Y-%m-%d %H:%M}\n{escape(told)}</title></rect>'
        )
    return "".join(slots)


def bar(share: float) -> str:
    """A small one for a table's cell, from 0 to 1."""
    width = round(80 * min(max(share, 0.0), 1.0), 1)
    return (
        '<svg class="bar" viewBox="0 0 80 8" width="80" height="8" aria-hidden="true"><rect class="back" width="80"'
        f' height="8" rx="2"/><rect class="front" width="{width}" height="8" rx="2"/></svg>'
    )
