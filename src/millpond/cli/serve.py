"""`millpond serve`: from flags to a configuration; the server does the rest."""

from __future__ import annotations

import signal
from functools import partial

from millpond.cli.config import start_problems
from millpond.cli.flags import Arguments, Subparsers, add_command, add_config_flags, load_config, load_or_exit
from millpond.cli.output import DONE, WRONG_USAGE, say

SERVE = """\
  millpond serve                                    this machine only, http://127.0.0.1:7410
  millpond serve --data ./data --bind unix:/run/millpond.sock
  millpond serve --config /etc/millpond.toml --log-level debug
  millpond serve --bind 0.0.0.0:7410 --tls-cert cert.pem --tls-key key.pem     other machines, with tokens

It ends on SIGTERM or Ctrl-C: what is under way is answered first. On SIGHUP, or with `millpond config reload`, it reads
its configuration again: stores and the log change at once, the rest with a restart.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "serve", "run the server", SERVE)
    parser.set_defaults(run=serve)
    add_config_flags(parser)


def serve(asked: Arguments) -> int:
    loaded = load_or_exit(asked)
    problems = start_problems(loaded)
    for text in (*loaded.warnings, *problems):
        say(f"millpond: {text}")
    if problems:
        return WRONG_USAGE
    from millpond import log
    from millpond.server import serve as run

    log.configure(loaded.config.log.format, loaded.config.log.level)
    run(loaded.config, partial(load_config, asked))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # we are ending: one more must not turn that into a failure
    return DONE
