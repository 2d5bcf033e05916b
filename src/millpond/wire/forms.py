"""Replies about plain items. Of such items only numbers and payloads differ, so the rest is encoded once, as a form.

What does not fit a form is encoded as any reply is; both ways give the same bytes, to which a test holds them.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Sequence
from functools import lru_cache

from millpond.model import CompletedItems, Grant, LeasedItem, LeasedItems, LeasedRun, Produced, ProducedItems, Result
from millpond.wire.codec import Codec
from millpond.wire.replies import LeaseItem

DIGITS = 12  # of an item's number in hex
SEAL = 8  # likewise of a token's checksum
FORMED_BYTES_MAX = 1 << 20  # of payloads: beyond that the codec is faster
FORMS_KEPT = 256  # a turn's produces share one, and so do the completes of what was leased in one

# Of a lease: its codec, a number's digits, what correlation ids begin with, tokens' checksum so far, one item of many,
# and the whole reply of one.
Form = tuple[Codec, int, str, int, bytes, bytes]


def leased(items: Sequence[LeasedItem], codec: Codec) -> tuple[str | None, bytes] | None:
    """The reply, with the correlation id of a single item; None if it does not fit a form.

    So it is if not all are plain, if one is no text (JSON), if a number is longer than others (MessagePack), and if
    there are many bytes: a form copies each payload once more than the codec.
    """
    if type(items) is not LeasedItems:
        return None
    runs = items.runs
    if len(runs) == 1 and len(runs[0].payloads) == 1:
        return _leased_one(runs[0], codec)
    if sum([sum(map(len, run.payloads)) for run in runs]) > FORMED_BYTES_MAX:
        return None
    entries: list[bytes] = []
    for run in runs:
        told = _leased_run(run, codec)
        if told is None:
            return None
        entries += told
    return None, _listed(b"items", entries, codec)


def produced(items: ProducedItems, codec: Codec) -> bytes | None:
    """None if MessagePack says of some numbers that they are longer than others."""
    numbers = items.numbers
    width = _width(numbers, codec)
    if width is None:
        return None
    form = _produced_form(codec, items.ids, items.correlation, width)
    return _listed(b"items", [form % (number, hexlify(number.to_bytes(6, "big"))) for number in numbers], codec)


def completed(results: CompletedItems, codec: Codec) -> bytes:
    form = _completed_form(codec, results.correlation)
    entries = [form % hexlify(number.to_bytes(6, "big")) for number in results.numbers]
    return _listed(b"results", entries, codec)


def _leased_one(run: LeasedRun, codec: Codec) -> tuple[str, bytes] | None:
    """As `_leased_run`, without lists: most lease one by one."""
    if run.known:
        return None
    grant, number, payload = run.grant, run.first, run.payloads[0]
    width = len(str(number)) if codec.binary else 0
    form: Form | None = grant.form
    if form is None or form[0] is not codec or form[1] != width:
        form = grant.form = _leased_form(grant, codec, width)
    _, _, correlation, check, _, whole = form
    digits, seal = grant.end(number, check)
    if codec.binary:
        return correlation + digits.decode(), whole % (
            number, digits, seal, digits, _binary_head(len(payload)), payload,
        )  # fmt: skip
    try:
        return correlation + digits.decode(), whole % (number, digits, seal, digits, codec.encode(payload.decode()))
    except UnicodeDecodeError:
        return None


def _leased_run(run: LeasedRun, codec: Codec) -> list[bytes] | None:
    """None if they do not fit a form."""
    grant, first, payloads = run.grant, run.first, run.payloads
    numbers = range(first, first + len(payloads))
    width = _width(numbers, codec)
    if width is None or run.known:
        return None
    form: Form | None = grant.form
    if form is None or form[0] is not codec or form[1] != width:
        form = grant.form = _leased_form(grant, codec, width)
    _, _, _, check, text, _ = form
    ends = grant.ends(numbers, check)
    if codec.binary:
        heads = [_binary_head(len(payload)) for payload in payloads]
        return [
            text % (number, digits, seal, digits, head, payload)
            for number, (digits, seal), head, payload in zip(numbers, ends, heads, payloads, strict=True)
        ]
    try:
        texts = [codec.encode(payload.decode()) for payload in payloads]
    except UnicodeDecodeError:
        return None
    return [
        text % (number, digits, seal, digits, shown)
        for number, (digits, seal), shown in zip(numbers, ends, texts, strict=True)
    ]


def _width(numbers: range, codec: Codec) -> int | None:
    """How many digits they have, all of them, if that matters."""
    if not codec.binary:
        return 0
    width = len(str(numbers[0]))
    return width if width == len(str(numbers[-1])) else None


def _leased_form(grant: Grant, codec: Codec, width: int) -> Form:
    ids, token, check, correlation = grant.beginnings()
    item = LeaseItem(
        id=ids + "0" * width,
        lease=token + "0" * (DIGITS + SEAL),
        correlation_id=correlation + "0" * DIGITS,
        attempts=1,
        deliveries=1,
        fencing_token=grant.fencing_token,
        lease_deadline=grant.lease_deadline,
        created_at=grant.created_at,
    )
    holes = (ids, width), (token, DIGITS + SEAL), (correlation, DIGITS)
    if codec.binary:
        item.data = b""
        start, lease, correlation_id, rest = _around(codec.encode(item).removesuffix(_binary_head(0)), *holes)
        text = b"%b%%d%b%%b%%b%b%%b%b%%b%%b" % (start, lease, correlation_id, rest)
    else:
        item.text = ""
        start, lease, correlation_id, rest = _around(codec.encode(item).removesuffix(b'""}'), *holes)
        text = b"%b%%d%b%%b%%b%b%%b%b%%b}" % (start, lease, correlation_id, rest)
    return codec, width, correlation, check, text, _listed(b"items", [text], codec)


@lru_cache(FORMS_KEPT)
def _produced_form(codec: Codec, ids: str, correlation: str, width: int) -> bytes:
    encoded = codec.encode(Produced(ids + "0" * width, correlation + "0" * DIGITS))
    return b"%b%%d%b%%b%b" % tuple(_around(encoded, (ids, width), (correlation, DIGITS)))


@lru_cache(FORMS_KEPT)
def _completed_form(codec: Codec, correlation: str) -> bytes:
    encoded = codec.encode(Result(True, correlation + "0" * DIGITS))
    return b"%b%%b%b" % tuple(_around(encoded, (correlation, DIGITS)))


def _around(encoded: bytes, *holes: tuple[str, int]) -> list[bytes]:
    """What lies around holes of so many bytes, each behind the text given, ready to be a format."""
    pieces: list[bytes] = []
    for before, length in holes:
        end = encoded.index(before.encode()) + len(before)
        pieces.append(encoded[:end])
        encoded = encoded[end + length :]
    return [piece.replace(b"%", b"%%") for piece in (*pieces, encoded)]


def _listed(field: bytes, entries: list[bytes], codec: Codec) -> bytes:
    """An object with this one field."""
    if not codec.binary:
        return b'{"%b":[%b]}' % (field, b",".join(entries))
    count = len(entries)
    head = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
    return b"".join((b"\x81", bytes((0xA0 | len(field),)), field, head, *entries))


@lru_cache(FORMS_KEPT)
def _binary_head(length: int) -> bytes:
    """Of so many bytes in MessagePack."""
    if length < 1 << 8:
        return b"\xc4" + length.to_bytes(1, "big")
    if length < 1 << 16:
        return b"\xc5" + length.to_bytes(2, "big")
    return b"\xc6" + length.to_bytes(4, "big")
