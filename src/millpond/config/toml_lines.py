"""On which line a key of a TOML file stands, which tomllib does not tell.

`lines_of` walks a document that tomllib has already accepted, so it only needs to know where keys and values begin and
end, not whether they are right. A path is a tuple of keys, and of positions in arrays and arrays of tables:
`("bind", 1)` is the second address, `("stores", 0, "name")` the name of the first store.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t]*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r'[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{1,2}(?!"))?'  # the closing quotes may follow one or two of the text
    r"|'''.*?'''(?:'{1,2}(?!'))?"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE = re.compile(r"[^,\]}\n#]+")


def lines_of(text: str) -> dict[Path, int]:
    """Of every key, table and array element, the first line that names it, counted from 1."""
    return _Walk(text).document()


class _Walk:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._counted = 0  # up to where the line breaks are in `_line`
        self._lines: dict[Path, int] = {}
        self._tables: dict[Path, int] = {}  # how many tables an array of tables has so far

    def document(self) -> dict[Path, int]:
        table: Path = ()
        self._skip(_SPACE)
        while self._at < len(self._text):
            if self._text.startswith("[[", self._at):
                table = self._header(2)
            elif self._text[self._at] == "[":
                table = self._header(1)
            else:
                self._pair(table)
            self._skip(_SPACE)
        return self._lines

    def _header(self, brackets: int) -> Path:
        """`[a.b]` or `[[a.b]]`, and the path of the table that it opens."""
        self._at += brackets
        *parents, last = self._dotted()
        path: Path = ()
        for key in parents:
            path = self._within((*path, key))
        path = (*path, last)
        if brackets == 2:
            self._note(path)
            self._tables[path] = self._tables.get(path, -1) + 1
            path = (*path, self._tables[path])
        self._note(path)
        self._at += brackets
        return path

    def _within(self, path: Path) -> Path:
        """A key that leads into an array of tables means its last one."""
        self._note(path)
        return (*path, self._tables[path]) if path in self._tables else path

    def _pair(self, table: Path) -> None:
        path = table
        for key in self._dotted():
            path = (*path, key)
            self._note(path)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _dotted(self) -> list[str]:
        keys = []
        while True:
            self._skip(_BLANK)
            keys.append(_plain(self._skip(_KEY)))
            self._skip(_BLANK)
            if self._text[self._at] != ".":
                return keys
            self._at += 1

    def _value(self, path: Path) -> None:
        start = self._text[self._at]
        if start == "[":
            self._array(path)
        elif start == "{":
            self._inline_table(path)
        else:
            self._skip(_STRING if start in "\"'" else _BARE)

    def _array(self, path: Path) -> None:
        position = 0
        while self._opens_member("]"):
            self._note((*path, position))
            self._value((*path, position))
            position += 1

    def _inline_table(self, path: Path) -> None:
        while self._opens_member("}"):
            self._pair(path)

    def _opens_member(self, end: str) -> bool:
        """From the opening bracket, or behind a member, to the next member; or past the end if there is none."""
        self._skip(_SPACE)
        if self._text[self._at] != end:
            self._at += 1  # the bracket or a comma
            self._skip(_SPACE)
        if self._text[self._at] != end:
            return True
        self._at += 1
        return False

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        assert match is not None, "tomllib has accepted this text"
        self._at = match.end()
        return match[0]

    def _note(self, path: Path) -> None:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        self._lines.setdefault(path, self._line)


def _plain(key: str) -> str:
    """A quoted key's text, by the one who knows all escapes."""
    return str(tomllib.loads(f"key = {key}")["key"]) if key[0] in "\"'" else key
