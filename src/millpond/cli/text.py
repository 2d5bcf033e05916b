"""Text as a table has room for it, and times and sizes as people read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

SHOWN_MAX = 60  # characters
_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def short(text: str | None) -> str:
    line = (text or "-").strip().partition("\n")[0]
    return line if len(line) <= SHOWN_MAX else f"{line[: SHOWN_MAX - 1]}…"


def first_line(text: str | None) -> str:
    """For a cell of a table: a terminal cuts what is too long for it, a pipe gets all of the line."""
    line, newline, _ = (text or "-").strip().partition("\n")
    return f"{line.rstrip()}…" if newline else line


def one_line(text: str) -> str:
    """What is no printable character is written out: a payload must not move the cursor of who looks at it."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "replace").decode() for one in text)


def instant(at: datetime | None) -> str:
    """In UTC, to the second."""
    return "-" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def span(seconds: float | None) -> str:
    """The two largest units: 1h30m, 2d, 450ms."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{round(seconds * 1000)}ms" if seconds else "0s"
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f}s"
    left, parts = round(seconds), []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


def counted(number: int, noun: str, nouns: str = "") -> str:
    """1 job, 2 jobs."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def progress_text(progress: Any) -> str:
    """25% (1 of 4) row 1; as JSON what no task of ours has written."""
    import msgspec

    if not isinstance(progress, dict) or not isinstance(progress.get("fraction"), int | float):
        return msgspec.json.encode(progress, enc_hook=str).decode()
    share = f"{progress['fraction']:.2%}".rstrip("0%").rstrip(".")
    of_all = f"({progress.get('done')} of {progress['total']})" if "total" in progress else ""
    return " ".join(filter(None, [f"{share}%", of_all, str(progress.get("note", ""))]))


def payload_fields(payload: bytes) -> dict[str, str]:
    """As items.get shows it: `text` if it is that, else `bytes` in base64."""
    from base64 import b64encode

    try:
        return {"text": payload.decode()}
    except UnicodeDecodeError:
        return {"bytes": b64encode(payload).decode()}


def payload_text(payload: bytes) -> str:
    """For people: text, or how much there is that is none."""
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return f"<{len(payload):,} bytes>"


def shown(item: Any) -> dict[str, Any]:
    """An item with its payload as JSON has it."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(getattr(item, "fields", item))
    payload = fields.pop("payload")
    return fields | payload_fields(payload if isinstance(payload, bytes) else item.payload)
