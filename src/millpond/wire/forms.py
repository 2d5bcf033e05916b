"""Replies about plain items. Of such items only numbers and payloads differ, so the rest is encoded once, as a form.

What does not fit a form is encoded as any reply is; both ways give the same bytes, to which a test holds them.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Iterator, Sequence
from functools import lru_cache

from millpond.model import CompletedItems, Grant, LeasedItem, LeasedItems, LeasedRun, Produced, ProducedItems, Result
from millpond.wire.codec import Codec
from millpond.wire.replies import LeaseItem

DIGITS = 12  # of an item's number in hex
SEAL = 8  # likewise of a token's checksum
FORMED_BYTES_MAX = 1 << 20  # of payloads in JSON: beyond that the codec is faster, which copies each once less
FORMS_KEPT = 256  # a turn's produces share one, and so do the completes of what was leased in one
DECIMALS, HEXES = 10**3, 16**3  # neighbours that differ in no more than three digits: a batch has few such blocks

# The digits in which they differ, at hand; those before them are the same for a block.
_DECIMAL_ENDS = [b"%03d" % number for number in range(DECIMALS)]
_HEX_ENDS = [b"%03x" % number for number in range(HEXES)]

# Of a lease: its codec, a number's digits, what correlation ids begin with, tokens' checksum so far, what lies around
# the holes of one item of many, and the whole reply of one, as a format.
Form = tuple[Codec, int, str, int, list[bytes], bytes]


def leased(items: Sequence[LeasedItem], codec: Codec) -> tuple[str | None, bytes] | None:
    """The reply, with the correlation id of a single item; None if it does not fit a form.

    So it is if not all are plain, and in JSON if one is no text, or if there are many bytes.
    """
    if type(items) is not LeasedItems:
        return None
    runs = items.runs
    if len(runs) == 1 and len(runs[0].payloads) == 1:
        return _leased_one(runs[0], codec)
    if not codec.binary and sum([sum(map(len, run.payloads)) for run in runs]) > FORMED_BYTES_MAX:
        return None
    pieces: list[bytes] = []
    for run in runs:
        shown = None if run.known else _shown(run.payloads, codec)
        if shown is None:
            return None
        first = run.first
        for numbers in _blocks(range(first, first + len(shown))):
            pieces += _leased_block(run.grant, numbers, shown[numbers.start - first : numbers.stop - first], codec)
    return None, _listed(b"items", len(items), pieces, b"}", codec)


def produced(items: ProducedItems, codec: Codec) -> bytes:
    pieces, end = list[bytes](), b""
    for numbers in _blocks(items.numbers):
        start, middle, end = _produced_form(codec, items.ids, items.correlation, len(str(numbers.start)))
        decimals, decimal_ends = _decimals(numbers)
        hexes, hex_ends = _hexes(numbers)
        block = [start + decimals, b"", middle + hexes, b""] * len(numbers)
        block[1::4], block[3::4] = decimal_ends, hex_ends
        pieces += block
    return _listed(b"items", len(items), pieces, end, codec)


def completed(results: CompletedItems, codec: Codec) -> bytes:
    start, end = _completed_form(codec, results.correlation)
    numbers, pieces = results.numbers, list[bytes]()
    if type(numbers) is range:
        told = [_hexes(block) for block in _blocks(numbers)]
    else:
        told = [(b"", [hexlify(number.to_bytes(6, "big")) for number in numbers])]
    for hexes, ends in told:
        before = start + hexes
        pieces += before, before.join(ends)
    return _listed(b"results", len(results), pieces, end, codec)


def _leased_one(run: LeasedRun, codec: Codec) -> tuple[str, bytes] | None:
    """As `leased`, without lists: most lease one by one."""
    if run.known:
        return None
    grant, number, payload = run.grant, run.first, run.payloads[0]
    _, _, correlation, check, _, whole = _form(grant, number, codec)
    digits, seal = grant.end(number, check)
    if codec.binary:
        return correlation + digits.decode(), whole % (
            number, digits, seal, digits, _binary_head(len(payload)), payload,
        )  # fmt: skip
    try:
        return correlation + digits.decode(), whole % (number, digits, seal, digits, codec.encode(payload.decode()))
    except UnicodeDecodeError:
        return None


def _leased_block(grant: Grant, numbers: range, shown: list[bytes], codec: Codec) -> list[bytes]:
    _, _, _, check, (start, lease, correlation, rest), _ = _form(grant, numbers.start, codec)
    decimals, decimal_ends = _decimals(numbers)
    hexes, hex_ends = _hexes(numbers)
    pieces = [start + decimals, b"", lease, b"", correlation + hexes, b"", rest, b""] * len(numbers)
    pieces[1::8], pieces[3::8], pieces[5::8], pieces[7::8] = decimal_ends, grant.ends(numbers, check), hex_ends, shown
    if codec.binary:
        pieces[6::8] = _with_heads(rest, shown)
    return pieces


def _with_heads(rest: bytes, payloads: list[bytes]) -> list[bytes]:
    """What is before each of them in MessagePack; mostly they are equally long."""
    heads = {size: rest + _binary_head(size) for size in set(map(len, payloads))}
    return [*heads.values()] * len(payloads) if len(heads) == 1 else [heads[len(payload)] for payload in payloads]


def _shown(payloads: list[bytes], codec: Codec) -> list[bytes] | None:
    """As the reply has them; None if one is no text."""
    if codec.binary:
        return payloads
    try:
        return [codec.encode(payload.decode()) for payload in payloads]
    except UnicodeDecodeError:
        return None


# ---- numbers ----------------------------------------------------------------------------------------------


def _blocks(numbers: range) -> Iterator[range]:
    """Cut where more digits change than those at hand, and where there is one more, which MessagePack says first."""
    start = numbers.start
    while start < numbers.stop:
        longer = 10 ** len(str(start))
        end = min(numbers.stop, longer, start - start % DECIMALS + DECIMALS, start - start % HEXES + HEXES)
        yield range(start, end)
        start = end


def _decimals(block: range) -> tuple[bytes, list[bytes]]:
    """What they begin with, and how each of them ends."""
    high, low = divmod(block.start, DECIMALS)
    if not high:  # no zeros before those
        return b"", [b"%d" % number for number in block]
    return b"%d" % high, _DECIMAL_ENDS[low : low + len(block)]


def _hexes(block: range) -> tuple[bytes, list[bytes]]:
    """The same in hex."""
    high, low = divmod(block.start, HEXES)
    return b"%09x" % high, _HEX_ENDS[low : low + len(block)]


# ---- forms ------------------------------------------------------------------------------------------------


def _form(grant: Grant, number: int, codec: Codec) -> Form:
    """It is kept with the grant: the next one to ask mostly wants the same."""
    width = len(str(number)) if codec.binary else 0
    form: Form | None = grant.form
    if form is None or form[0] is not codec or form[1] != width:
        form = grant.form = _leased_form(grant, codec, width)
    return form


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
    if codec.binary:
        item.data = b""
        encoded, hole = codec.encode(item).removesuffix(_binary_head(0)), b"%b%b"
    else:
        item.text = ""
        encoded, hole = codec.encode(item).removesuffix(b'""}'), b"%b"
    around = _around(encoded, (ids, width), (token, DIGITS + SEAL), (correlation, DIGITS))
    start, *others = [piece.replace(b"%", b"%%") for piece in around]
    one = b"%b%%d%b%%b%%b%b%%b%b%b" % (start, *others, hole)
    whole = _listed(b"items", 1, [one], b"}", codec)
    return codec, width, correlation, check, [_between(b"}", codec) + around[0], *around[1:]], whole


@lru_cache(FORMS_KEPT)
def _produced_form(codec: Codec, ids: str, correlation: str, width: int) -> tuple[bytes, bytes, bytes]:
    encoded = codec.encode(Produced(ids + "0" * width, correlation + "0" * DIGITS))
    start, middle, end = _around(encoded, (ids, width), (correlation, DIGITS))
    return _between(end, codec) + start, middle, end


@lru_cache(FORMS_KEPT)
def _completed_form(codec: Codec, correlation: str) -> tuple[bytes, bytes]:
    encoded = codec.encode(Result(True, correlation + "0" * DIGITS))
    start, end = _around(encoded, (correlation, DIGITS))
    return _between(end, codec) + start, end


def _around(encoded: bytes, *holes: tuple[str, int]) -> list[bytes]:
    """What lies around holes of so many bytes, each behind the text given."""
    pieces: list[bytes] = []
    for before, length in holes:
        end = encoded.index(before.encode()) + len(before)
        pieces.append(encoded[:end])
        encoded = encoded[end + length :]
    return [*pieces, encoded]


def _between(end: bytes, codec: Codec) -> bytes:
    """How an entry ends, and what is before the next. In MessagePack its last value ends an entry."""
    return b"" if codec.binary else end + b","


def _listed(field: bytes, count: int, pieces: list[bytes], end: bytes, codec: Codec) -> bytes:
    """An object with this one field. Each entry begins with what is between two, which the first one sheds."""
    first = pieces[0].removeprefix(_between(end, codec))
    if codec.binary:
        head = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
        pieces[0] = b"\x81%c%b%b%b" % (0xA0 | len(field), field, head, first)
    else:
        pieces[0] = b'{"%b":[%b' % (field, first)
        pieces.append(end + b"]}")
    return b"".join(pieces)


@lru_cache(FORMS_KEPT)
def _binary_head(length: int) -> bytes:
    """Of so many bytes in MessagePack."""
    if length < 1 << 8:
        return b"\xc4" + length.to_bytes(1, "big")
    if length < 1 << 16:
        return b"\xc5" + length.to_bytes(2, "big")
    return b"\xc6" + length.to_bytes(4, "big")
