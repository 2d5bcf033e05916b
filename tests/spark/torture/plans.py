"""Which kills, in which worlds: drawn by a seed, every point with every victim before any of them comes again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from random import Random
from typing import NamedTuple

from tests.spark.torture.points import ANY_INSTANT, POINTS, Given, Kill, Point, Query, Trigger, Victim, kill_at
from tests.spark.torture.world import Setup

WORLD_KILLS = 20  # or one more, of one server's data and one checkpoint: enough to meet, few enough to be read
SMALL = (30, (75,))  # items in a batch at most, and in the waves that come: three batches a wave
LARGE = (12_000, (13_000, 75, 75))  # pages, chunks and tasks are more than one then
KINDS = (
    (False, Trigger.ALWAYS, SMALL),
    (True, Trigger.ALWAYS, LARGE),
    (False, Trigger.NOW, LARGE),
    (True, Trigger.NOW, SMALL),
)
INSTANTS = 4  # random ones more than any other point
IN_A_BATCH = ("after partitions", "in the middle of read")
BETWEEN_BATCHES = "before commit(end of N-1)"  # in one too, unless that was the last of a run
ENDS_A_RUN = (Victim.DRIVER, Victim.MACHINE, Victim.PYTHON)  # of a query: the next one begins from the checkpoint

Pair = tuple[Point, Victim]


class Plan(NamedTuple):
    number: int
    setup: Setup
    kills: tuple[Kill, ...]


def plans(seed: int) -> Iterator[Plan]:
    """Without an end: all kinds of worlds in turn."""
    random = Random(seed)
    deck: list[Pair] = []
    for number in count():
        executors, trigger, (items_max, waves) = KINDS[number % len(KINDS)]
        setup = Setup(f"{seed}/{number}", executors, trigger, random.choice((1, 2, 3)), items_max, waves)
        yield Plan(number, setup, tuple(_kills(_drawn(deck, setup, random), setup.trigger, random)))


def plan_of(seed: int, number: int) -> Plan:
    return next(islice(plans(seed), number, None))


def _drawn(deck: list[Pair], setup: Setup, random: Random) -> list[Pair]:
    """The first of the deck that there can be in this world. It is filled again when it has too few of them."""
    drawn: list[Pair] = []
    while True:
        for pair in list(deck):
            if _suits(pair, setup, drawn):
                deck.remove(pair)
                drawn.append(pair)
                if sum(map(_weight, drawn)) >= WORLD_KILLS:
                    return drawn
        more = [(point, victim) for point in POINTS for victim in point.victims(executors=True)]
        more += [(ANY_INSTANT, victim) for victim in Victim for _ in range(INSTANTS)]
        random.shuffle(more)
        deck += more


def _suits(pair: Pair, setup: Setup, drawn: list[Pair]) -> bool:
    point, victim = pair
    if setup.trigger not in point.triggers or (victim == Victim.EXECUTOR and not setup.executors):
        return False
    if point.given == Given.NEW and victim not in ENDS_A_RUN:  # after it there is no new checkpoint to begin with
        return not any(it.given == Given.NEW and other not in ENDS_A_RUN for it, other in drawn)
    return True


def _weight(pair: Pair) -> int:
    return 2 if pair[0].given == Given.REPLAYED else 1


def _kills(pairs: list[Pair], trigger: Trigger, random: Random) -> Iterator[Kill]:
    """Those of a new checkpoint first, all of one query: the other one goes on. Before a replay, what causes it."""
    causes = IN_A_BATCH if trigger == Trigger.NOW else (BETWEEN_BATCHES, *IN_A_BATCH)
    first = random.choice(tuple(Query))
    new = [pair for pair in pairs if pair[0].given == Given.NEW]
    for point, victim in sorted(new, key=lambda pair: pair[1] not in ENDS_A_RUN):
        yield Kill(point, victim, first)
    for point, victim in pairs:
        query = random.choice(point.queries)
        if point.given == Given.REPLAYED:
            yield kill_at(random.choice(causes), random.choice((Victim.DRIVER, Victim.MACHINE)), query)
        if point.given != Given.NEW:
            yield Kill(point, victim, query)
