"""`millpond demo`: the main job in a minute, in a directory of its own that is gone afterwards."""

from __future__ import annotations

from millpond.cli.flags import Arguments, Subparsers, add_command

EXAMPLES = """\
  millpond demo                                    10,000 items in and out; a few fail, one dies; nothing is lost
"""


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "demo", "the main job in a minute: produce, lease, complete, nothing lost", EXAMPLES)
    verb.set_defaults(run=demo)


def demo(asked: Arguments) -> int:
    from millpond.demo import main

    return main()
