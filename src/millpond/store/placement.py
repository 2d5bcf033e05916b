"""Which store each partition of a new queue goes to: by largest remainder, so that none is lost to rounding."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from millpond.errors import InvalidRequest


def place(count: int, affinities: Mapping[str, float]) -> list[str]:
    """A store's name for each of `count` partitions, those of a store side by side; a tie goes to the first named."""
    weights = {name: Fraction(str(affinity)) for name, affinity in affinities.items() if affinity > 0}
    total = sum(weights.values())
    if not total:
        raise InvalidRequest(
            "no store takes partitions, as all have affinity 0; raise the affinity of one under [[stores]], then"
            " `millpond config reload`"
        )
    shares = {name: count * weight / total for name, weight in weights.items()}
    whole = {name: int(share) for name, share in shares.items()}
    missing = count - sum(whole.values())
    for name in sorted(shares, key=lambda one: whole[one] - shares[one])[:missing]:  # stable: a tie is in order
        whole[name] += 1
    return [name for name, partitions in whole.items() for _ in range(partitions)]
