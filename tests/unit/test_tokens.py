"""Ids, correlation ids and lease tokens: what is made can be read, and nothing else can."""

from __future__ import annotations

from random import Random

import pytest

from millpond.queue.tokens import HEADS_KEPT, Mint, TokenReader, read_id


@pytest.mark.parametrize("correlation_id", [None, "c", "with.dots and spaces", "x" * 128])
def test_a_token_holds_partition_number_grant_creation_and_correlation_id(correlation_id: str | None) -> None:
    rng, reader = Random(1), TokenReader("inc")
    for _ in range(200):
        partition, number, grant = rng.randint(0, 999), rng.randint(1, (1 << 44) - 1), rng.randint(1, 1 << 50)
        created = rng.randint(0, 1 << 45)
        token = Mint("inc", partition).token(number, grant, created, correlation_id)
        expected = (partition, number, grant, created, correlation_id)
        assert tuple(reader.read(token) or ()) == expected
        assert [tuple(one or ()) for one in reader.read_all([token, token])] == [expected, expected]


def test_many_tokens_are_read_as_one_is() -> None:
    mint, reader = Mint("inc", 3), TokenReader("inc")
    plain = [mint.token(number, 5, 1_000, None) for number in range(1, 50)]
    mixed = [*plain, "", "nonsense", mint.token(7, 5, 1_000, "own"), Mint("other", 3).token(1, 1, 1, None)]
    spaced = [plain[0], plain[1][:-2] + "  "]
    for tokens in (plain, mixed, spaced, [], ["x"]):
        assert list(reader.read_all(tokens)) == [reader.read(token) for token in tokens]


def test_plain_tokens_of_one_grant_are_read_together_and_no_others() -> None:
    mint, reader = Mint("inc", 3), TokenReader("inc")
    numbers = [*range(1, 50), 7, (1 << 44) - 1]
    plain = [mint.token(number, 5, 1_000, None) for number in numbers]
    head, found = reader.read_together(plain) or ((), [])
    assert (head[:3], found) == ((3, 5, 1_000), numbers)
    strangers = [mint.token(1, 6, 1_000, None), mint.token(1, 5, 1_001, None), Mint("inc", 4).token(1, 5, 1_000, None)]
    strangers += [Mint("other", 3).token(1, 5, 1_000, None), mint.token(7, 5, 1_000, "own"), "", "nonsense"]
    for stranger in strangers:
        assert reader.read_together([*plain, stranger]) is None
    for mangled in (plain[1][:-2] + "  ", plain[1][:-1] + "g", plain[1][:-10] + "0" * 10, plain[1] + "0"):
        assert reader.read_together([plain[0], mangled]) is None
    assert reader.read_together([plain[0].replace("inc.", "inc. ", 1)[:-1]] * 2) is None


@pytest.mark.parametrize("first", [1, 990, 1_020, 5 << 20, (1 << 44) - 60])
def test_neighbours_are_sealed_together_as_each_is_by_itself(first: int) -> None:
    mint, rng = Mint("inc", 3), Random(first)
    for count in (1, 2, 40, 60, 1_000, 2_500):
        grant, created = rng.randrange(1 << 50), rng.randrange(1 << 45)
        assert mint.names(first, count, grant, created) == [
            (mint.id(number), mint.token(number, grant, created, None), mint.correlation_id(number, created))
            for number in range(first, first + count)
        ]


@pytest.mark.parametrize("first", [1, 1_000, (1 << 44) - 30, (1 << 48) - 30])
def test_tokens_of_neighbours_are_read_together_whichever_are_left_out_and_in_any_order(first: int) -> None:
    mint, reader = Mint("inc", 3), TokenReader("inc")
    numbers = list(range(first, first + 30))
    ways = [numbers, numbers[::-1], numbers[:7] + numbers[8:], numbers[:1], [*numbers, numbers[-1]], [first] * 3]
    for way in ways:
        tokens = [mint.token(number, 5, 1_000, None) for number in way]
        for spelled in (tokens, [tokens[0].replace("f", "F"), *tokens[1:]]):
            head, found = reader.read_together(spelled) or ((), [])
            assert (head[:3], list(found)) == ((3, 5, 1_000), way)


def test_neighbours_of_which_one_is_mangled_are_not_read_together() -> None:
    """As they are joined to be compared, what is wrong in each may seem right in all of them."""
    mint, reader = Mint("inc", 3), TokenReader("inc")
    a, b, c = (mint.token(number, 5, 1_000, None) for number in (41, 42, 43))
    cut = len(a) - 20
    wrongs = [[a + b[:3], b[3:], c], [a[:-1], a[-1] + b, c], [a + "\n" + b, c], [a, b + "\n", c], ["", a, b, c]]
    wrongs += [[a, "0" + b[:-1], c], [a, b[:cut] + c[cut:][::-1], c], [a, b[cut:], b[:cut] + c], [a, b[cut:], c]]
    for wrong in wrongs:
        assert reader.read_together(wrong) is None
        assert None in reader.read_all(wrong)
    assert reader.read_together([a, b, c]) is not None


def test_only_so_many_beginnings_of_tokens_are_remembered() -> None:
    mint, reader = Mint("inc", 3), TokenReader("inc")
    for grant in [*range(2 * HEADS_KEPT + 1), 0]:
        assert reader.read(mint.token(7, grant, 1_000, None)) == (3, 7, grant, 1_000, None)
        assert len(reader._heads) <= HEADS_KEPT


@pytest.mark.parametrize("correlation_id", [None, "own"])
def test_a_mangled_token_is_refused(correlation_id: str | None) -> None:
    reader = TokenReader("inc")
    token = Mint("inc", 3).token(12, 34, 56, correlation_id)
    start = len("inc.")
    for place in range(start, len(token)):
        for digit in "0f.":
            mangled = token[:place] + digit + token[place + 1 :]
            assert mangled == token or reader.read(mangled) is None
    for cut in range(len(token)):
        assert reader.read(token[:cut]) is None
    assert reader.read(token + "0") is None


def test_a_token_of_another_incarnation_is_refused() -> None:
    token = Mint("inc1", 0).token(1, 1, 1, None)
    assert TokenReader("inc2").read(token) is None
    assert TokenReader("inc2").read(token.replace("inc1", "inc2")) is None


def test_an_id_is_read_back_and_only_as_it_was_written() -> None:
    mint = Mint("inc", 3)
    assert read_id("inc", mint.id(12)) == (3, 12)
    others = ["inc-3-012", "inc-03-12", "inc-3-", "inc--12", "inc-3-12-", "inc-3-x", "inc-3-१", "other-3-12", "inc"]
    for other in others:
        assert read_id("inc", other) is None
    assert read_id("inc", f"inc-3-{1 << 44}") is None
    assert read_id("inc", "inc-70000-1") is None


def test_correlation_ids_are_distinct_over_partitions_and_numbers() -> None:
    made = {
        Mint(incarnation, partition).correlation_id(number, created)
        for incarnation in ("a", "b")
        for partition in range(5)
        for number in range(1, 20)
        for created in (0, 1_700_000_000_000)
    }
    assert len(made) == 2 * 5 * 19 * 2
