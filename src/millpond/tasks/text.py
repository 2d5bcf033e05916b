"""Text that comes from anywhere, such as the name of a file in an error, as it can be sent and kept. No I/O."""

from __future__ import annotations


def sendable(text: str) -> str:
    """What UTF-8 does not have is shown as an escape."""
    return text.encode(errors="backslashreplace").decode()
