"""Kills Spark and the server again and again: `python -m tests.spark.torture.run --kills 200 --seed 1`.

Worlds are run one after the other until there were so many kills. What goes wrong ends the run, with the command that
replays its world. The last line is `N kills in W worlds: all I items arrived once`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.spark.torture.plans import Plan, plan_of, plans
from tests.spark.torture.points import POINTS, Kill, Victim
from tests.spark.torture.world import Broken, World


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.torture.run", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="at least so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--world", type=int, help="only this one")
    parser.add_argument("--plan", action="store_true", help="only say what would be done")
    return parser.parse_args()


def chosen(seed: int, world: int | None, kills: int) -> Iterator[Plan]:
    if world is not None:
        yield plan_of(seed, world)
        return
    for plan in plans(seed):
        yield plan
        kills -= len(plan.kills)
        if kills <= 0:
            return


def main() -> int:
    asked = arguments()
    done: Counter[Kill] = Counter()
    items = worlds = 0
    began = time.monotonic()
    for plan in chosen(asked.seed, asked.world, asked.kills):
        say(f"world {plan.number}: {plan.setup}")
        if asked.plan:
            say("\n".join(f"  {kill}" for kill in plan.kills))
            done.update(plan.kills)
            continue
        try:
            items += run(plan, done)
            worlds += 1
        except Exception as error:
            say(table(done))
            say(str(error) if isinstance(error, Broken) else traceback.format_exc())
            say(f"world {plan.number} of seed {asked.seed} went wrong; replay it with:")
            say(f"python -m tests.spark.torture.run --seed {asked.seed} --world {plan.number}")
            return 1
    say(table(done))
    say(f"{time.monotonic() - began:.0f} s, seed {asked.seed}")
    say(f"{done.total()} kills in {worlds} worlds: all {items} items arrived once")
    return 0


def run(plan: Plan, done: Counter[Kill]) -> int:
    """How many items there were. The kills count even if it ends in tears."""
    temporary = tempfile.TemporaryDirectory(prefix="millpond-torture-")
    with temporary as folder, World(Path(folder), plan.setup, say) as world:
        try:
            world.run(plan.kills)
        finally:
            done.update(world.done)
        return world.items


def table(done: Counter[Kill]) -> str:
    """Points by victims."""
    cells = Counter[tuple[str, Victim]]()
    for kill, times in done.items():
        cells[kill.point.name, kill.victim] += times
    rows = [["", *Victim, "all"]]
    for point in POINTS:
        row = [cells[point.name, victim] for victim in Victim]
        rows.append([point.name, *(str(number or "-") for number in row), str(sum(row))])
    sums = [sum(times for (_, of), times in cells.items() if of == victim) for victim in Victim]
    rows.append(["all", *map(str, sums), str(sum(sums))])
    width = max(len(row[0]) for row in rows)
    return "\n".join(row[0].ljust(width) + "".join(cell.rjust(10) for cell in row[1:]) for row in rows)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
