"""What fits a task's annotations, for who enqueues and for the worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import pytest

from millpond.errors import InvalidRequest
from millpond.tasks.arguments import Arguments
from millpond.tasks.context import Context
from millpond.tasks.errors import WrongArguments


class Point(msgspec.Struct):
    x: int
    y: int = 0


@dataclass
class Name:
    first: str


class Colour(enum.Enum):
    RED = "red"


Small = Annotated[int, msgspec.Meta(le=10)]


def typed(
    when: datetime, point: Point, name: Name, colour: Colour, raw: bytes, by_number: dict[int, float], small: Small = 1
) -> None: ...


def loose(a, *rest: int, flag: bool = False, **more: str): ...  # type: ignore[no-untyped-def]


def with_context(context: Context, n: int, other: Context | None = None) -> None: ...


NOW = datetime(2026, 1, 2, tzinfo=UTC)
GOOD = (NOW, Point(1), Name("A"), Colour.RED, b"\0\xff", {1: 2.5})


@pytest.mark.parametrize("encoding", ["", "msgpack"])
def test_arguments_arrive_as_they_are_annotated(encoding: str) -> None:
    arguments = Arguments("typed", typed)
    arguments.check(GOOD, {"small": 3}, encoding)
    codec: Any = msgspec.msgpack if encoding else msgspec.json
    args, kwargs = codec.decode(codec.encode((GOOD, {"small": 3})))
    assert arguments.convert(args, kwargs, encoding) == ((*GOOD, 3), {})
    assert list(arguments.convert(args, {}, encoding)[0]) == list(GOOD)


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        ((NOW,), {}, "missing a required argument: 'point'"),
        ((*GOOD, 1, 2), {}, "too many positional arguments"),
        (GOOD, {"samll": 1}, "unexpected keyword argument 'samll'"),
        (("soon", *GOOD[1:]), {}, "argument 'when'"),
        ((NOW, {"x": "1"}, *GOOD[2:]), {}, "argument 'point': Expected `int`, got `str`"),
        (GOOD, {"small": 11}, "argument 'small': Expected `int` <= 10"),
        ((NOW, object(), *GOOD[2:]), {}, "object is unsupported"),
        ((NOW, Point(float("nan")), *GOOD[2:]), {}, "an argument is NaN, which JSON cannot say"),  # type: ignore[arg-type]
        ((*GOOD[:5], {1: float("inf")}), {}, "an argument is Infinity"),
    ],
)
def test_arguments_that_do_not_fit_are_told(args: Any, kwargs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WrongArguments, match=complaint) as caught:
        Arguments("typed", typed).check(args, kwargs, "")
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, InvalidRequest)


def test_what_is_not_annotated_takes_anything_that_can_be_sent() -> None:
    arguments = Arguments("loose", loose)
    arguments.check(({"deep": [1, None]}, 1, 2), {"flag": True, "x": "y"}, "")
    assert arguments.convert([[1], 2], {"x": "y"}, "") == (([1], 2), {"x": "y"})
    with pytest.raises(WrongArguments, match="argument 'rest'"):
        arguments.check((1, "2"), {}, "")
    with pytest.raises(WrongArguments, match="argument 'x'"):
        arguments.check((1,), {"x": 2}, "")


def test_the_context_is_no_argument() -> None:
    arguments = Arguments("with_context", with_context)
    context: Any = object()
    assert arguments.convert([3], {}, "", context) == ((context, 3, context), {})
    assert arguments.convert([], {"n": 3}, "", context) == ((context, 3, context), {})
    with pytest.raises(WrongArguments, match="call it as with_context"):
        arguments.check((1, 2), {}, "")


def test_annotations_that_name_nothing_are_told() -> None:
    def lost(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(WrongArguments, match="Nowhere"):
        Arguments("lost", lost).check((1,), {}, "")
