"""A task's arguments against its annotations: the same check for who enqueues and for the worker.

Arguments travel as JSON or MessagePack. What comes out of there is converted to what the function's annotations say
(structs, dataclasses, dates, enums, whatever msgspec knows), and what does not fit is refused. A parameter that is
annotated `Context` is not an argument: the worker fills it in.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec import json as _json
from msgspec import msgpack as _msgpack

from millpond.jobs.spec import MSGPACK
from millpond.tasks.context import Context
from millpond.tasks.errors import WrongArguments
from millpond.tasks.numbers import odd_number

_FREE: Final = (Any, inspect.Parameter.empty, object)  # annotations that everything fits
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_PLAIN: Final = frozenset({int, str, bool, type(None)})  # come out of any encoding as they went in
_OF_FEW: Final = 8  # positional arguments up to which the quick way is worth it


class Arguments:
    """Looks at the annotations when it is first asked: they may name what is defined further down."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function

    def convert(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], encoding: str, context: Context | None = None
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What came over the wire as the function wants it; WrongArguments if it does not fit."""
        if not kwargs and len(args) == self._quick:
            return (self._positional(args, encoding) if args else args), kwargs
        given = self.bind(args, kwargs).arguments
        values = {name: self._parameter(name, value, encoding) for name, value in given.items()}
        for name in self.contexts:
            values[name] = context
        ordered = OrderedDict((name, values[name]) for name in self._whole.parameters if name in values)
        bound = inspect.BoundArguments(self._whole, ordered)
        return bound.args, bound.kwargs

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any], encoding: str) -> None:
        """For who enqueues: by what a worker will get out of the encoding."""
        if kwargs or not _PLAIN.issuperset(map(type, args)):
            try:
                args, kwargs = self._sent(args, kwargs, encoding)
            except WrongArguments:
                raise
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise WrongArguments(
                    f"task {self._name}: an argument cannot be sent ({error}); use JSON values"
                ) from None
        self.convert(args, kwargs, encoding)

    def _sent(self, args: Sequence[Any], kwargs: Mapping[str, Any], encoding: str) -> Any:
        """As they come out of the encoding."""
        if encoding == MSGPACK:
            return _msgpack.decode(_msgpack.encode((args, kwargs)))
        sent = _json.encode((args, kwargs))
        if b"null" in sent and (odd := odd_number((args, kwargs))) is not None:
            raise WrongArguments(
                f"task {self._name}: an argument is {odd}, which JSON cannot say; give the task encoding='msgpack'"
            )
        return _json.decode(sent)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise WrongArguments(f"task {self._name}: {error}; call it as {self._name}{self.signature}") from None

    def result(self, value: Any, encoding: str) -> Any:
        """What a task returned, as it was annotated; a value of another shape as it is."""
        wanted = self._hints.get("return", Any)
        if wanted in _FREE or wanted is type(None):
            return value
        try:
            return msgspec.convert(value, wanted, str_keys=encoding != MSGPACK)
        except (msgspec.ValidationError, TypeError):
            return value

    @cached_property
    def contexts(self) -> tuple[str, ...]:
        """The parameters that get the context, by name."""
        return tuple(name for name in self._whole.parameters if _is_context(self._hints.get(name)))

    @cached_property
    def signature(self) -> inspect.Signature:
        """Of the arguments that callers give."""
        kept = [one for name, one in self._whole.parameters.items() if name not in self.contexts]
        return self._whole.replace(parameters=kept)

    # ---- what the annotations say ---------------------------------------------------------------------------

    @cached_property
    def _whole(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self._function, include_extras=True)
        except NameError as error:
            raise WrongArguments(
                f"task {self._name}: an annotation names what is not there ({error}); define it in the module"
            ) from None

    @cached_property
    def _quick(self) -> int:
        """How many arguments are given where all are, by position; -1 where it is not as simple."""
        if self.contexts:
            return -1
        parameters = list(self.signature.parameters.values())
        simple = len(parameters) <= _OF_FEW and all(one.kind in _POSITIONAL for one in parameters)
        return len(parameters) if simple else -1

    @cached_property
    def _types(self) -> list[Any]:
        """Of the positional ones, in order; None: anything fits. What is of the very type (int, str) fits as it is."""
        return [self._type(name) for name in self.signature.parameters]

    def _type(self, name: str) -> Any:
        hint = self._hints.get(name, Any)
        return None if hint in _FREE else hint

    # ---- one value ------------------------------------------------------------------------------------------

    def _positional(self, args: Sequence[Any], encoding: str) -> list[Any]:
        return [
            value if wanted is None or type(value) is wanted else self._value(place, value, wanted, encoding)
            for place, (value, wanted) in enumerate(zip(args, self._types, strict=True))
        ]

    def _parameter(self, name: str, value: Any, encoding: str) -> Any:
        wanted = self._type(name)
        if wanted is None:
            return value
        kind = self.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple(self._value(name, one, wanted, encoding) for one in value)
        if kind is inspect.Parameter.VAR_KEYWORD:
            return {key: self._value(key, one, wanted, encoding) for key, one in value.items()}
        return self._value(name, value, wanted, encoding)

    def _value(self, name: str | int, value: Any, wanted: Any, encoding: str) -> Any:
        try:
            return msgspec.convert(value, wanted, str_keys=encoding != MSGPACK)
        except (msgspec.ValidationError, TypeError) as error:
            shown = list(self.signature.parameters)[name] if isinstance(name, int) else name
            raise WrongArguments(f"task {self._name}: argument {shown!r}: {error}; see its annotation") from None


def _is_context(hint: Any) -> bool:
    """`Context`, or `Context | None` for a function that is called without one, too."""
    return hint is Context or (Context in get_args(hint) and set(get_args(hint)) <= {Context, type(None)})
