"""The program of the processes that run commands: `python -I -S supervisor.py WORKER CHANNEL`.

    worker ── warden ─┬─ supervisor ── sh -c COMMAND ── …
                      └─ supervisor ── sh -c COMMAND ── …

A worker starts one warden, which forks a supervisor for each slot; both are small, and live as long as the worker
does. A supervisor runs one command after the other. Nothing is left behind, whoever dies:

- the worker: supervisors see it at once, end what they run and go; the warden goes last;
- a supervisor: what it ran becomes the warden's, which ends it and tells the worker;
- the warden: supervisors end what they run and go; the worker starts another warden;
- worker and supervisor: the warden ends what is left;
- all of them at once: the system kills the command's process group (see `spawning.Leash`), and the next worker finds
  the rest by its environment, before it runs anything;
- worker and warden, while a supervisor is stopped (SIGSTOP): the next worker kills it (see `strays.py`).

None of them imports more than a few modules: neither site-packages nor millpond itself.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path


def find_package() -> None:
    """Makes `millpond.worker` importable without what `import millpond` brings along."""
    here = Path(__file__).parent
    for name, folder in (("millpond", here.parent), ("millpond.worker", here)):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


if __name__ == "__main__":
    find_package()
    from millpond.worker.warden import main

    main(int(sys.argv[1]), int(sys.argv[2]))
