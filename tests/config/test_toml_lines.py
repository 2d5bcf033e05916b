"""Lines of keys, in every form that TOML has for them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from millpond.config.toml_lines import Path, lines_of


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a = 1\nb = 2", ("b",), 2),
        ("# a = 1\n\n  a = 1", ("a",), 3),
        ("[t]\n[u]\na = 1", ("u", "a"), 3),
        ("[ t . u ]\na = 1", ("t", "u", "a"), 2),
        ("t.a = 1\nt.b = 2", ("t", "b"), 2),
        ("t . a = 1", ("t", "a"), 1),
        ('x = 1\n"a" = 1', ("a",), 2),
        ("x = 1\n'a.b'.c = 1", ("a.b", "c"), 2),
        ('x = 1\n"\\u0061 \\"=\\" #" = 1', ('a "=" #',), 2),
        ('["a]b"]\nc = 1', ("a]b", "c"), 2),
        ('x = """\na = 1\n[t]\n"""\na = 2', ("a",), 5),
        ("x = '''\n\\'''\na = 2", ("a",), 3),
        ('x = """two ""quotes"" end"""""\na = 2', ("a",), 2),
        ('x = """esc \\""" not yet"""\na = 2', ("a",), 2),
        ("x = ''''one'''''\na = 2", ("a",), 2),
        ('x = "a = 1 # [t]"\na = 2', ("a",), 2),
        ("x = [\n 1, # one ]\n 2,\n]\na = 2", ("a",), 5),
        ("x = [\n 1, # one ]\n 2,\n]", ("x", 1), 3),
        ("x = [[], [ ], [\n[1]]]\na = 2", ("a",), 3),
        ("x = [[1,\n2], [3]]", ("x", 0, 1), 2),
        ("x = ['a]', \"b,\",\n'c']", ("x", 2), 2),
        ("x = { y = 1, z.w = [ {q = 2} ] }\na = 1", ("x", "z", "w", 0, "q"), 1),
        ("x = {}\na = 1", ("a",), 2),
        ("x = 1979-05-27 07:32:00 # when\na = 1", ("a",), 2),
        ("[[s]]\nn = 1\n[[s]]\nn = 2", ("s", 1, "n"), 4),
        ("[[s]]\n[[s]]\n[s.t]\nn = 2\n[[s.u]]\nn = 3", ("s", 1, "u", 0, "n"), 6),
        ("[[s]]\n[s.t]\nn = 1\n[[s]]\n[s.t]\nn = 2", ("s", 1, "t", "n"), 6),
        ("a = 1 # no line's end", ("a",), 1),
        ("[t]", ("t",), 1),
    ],
)
def test_the_line_of_a_key_is_found(text: str, path: Path, line: int) -> None:
    tomllib.loads(text)
    assert lines_of(text)[path] == line


def paths(value: Any, path: Path = ()) -> set[Path]:
    members: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    return ({path} if path else set()).union(*(paths(inner, (*path, key)) for key, inner in members))


def test_every_path_of_a_document_has_a_line_and_no_other() -> None:
    text = """
title = "all of it"
bare-key_1 = +1_000
1234 = -inf
"" = 'empty'
a.b."c.d" = 0x1F
dates = [1979-05-27T07:32:00Z, 07:32:00]
nested = [ [ "a", 'b' ], { x = 1, y = [ { z = true } ] }, \"\"\"
]} \"\"\" ]

[t]
[t.u]  # comment
k = false
[t.u.v.w]
k = 'x'
[[r]]
k = 1
[[r.q]]
[[r.q]]
k = 1
[[r]]
[r.p]
k = {}
"""
    assert set(lines_of(text)) == paths(tomllib.loads(text))
