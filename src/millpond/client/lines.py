"""What a line of a subscription says. No I/O."""

from __future__ import annotations

import msgspec

from millpond.client.http1 import WRONG
from millpond.errors import BadReply, made
from millpond.model import PAYLOAD_BYTES_MAX, STATE_DOC_BYTES_MAX
from millpond.wire.replies import ErrorReply, LeaseItem

LINE_BYTES_MAX = 8 * (PAYLOAD_BYTES_MAX + STATE_DOC_BYTES_MAX)  # text of control characters is six times as long

_item = msgspec.json.Decoder(LeaseItem)
_error = msgspec.json.Decoder(ErrorReply)


def item_of(line: bytes) -> LeaseItem | None:
    """None for a line that only shows that the stream lives; an error's is raised."""
    if line.strip() == b"{}":
        return None
    try:
        return _item.decode(line)
    except (msgspec.MsgspecError, UnicodeError):
        pass
    try:
        error = _error.decode(line).error
    except (msgspec.MsgspecError, UnicodeError) as wrong:
        raise BadReply(f"a line of the stream is no item ({wrong}); {WRONG}") from None
    raise made(error.code, error.message, details=error.details)
