"""A worker with one job, as a process of its own that a test can kill: FOLDER LEASE GRACE DELIVERY COMMAND.

Prints the process id of its warden, then how the job ended. The lease is not extended.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.worker.commanding import commands, job_of, leased


async def main(folder: Path, lease: float, grace: float, delivery: int, command: str) -> None:
    async with commands(folder, grace=grace) as started:
        supervisors = started.executor.supervisors
        assert supervisors is not None
        print(supervisors.pid, flush=True)
        outcome = await started.begin(job_of(command, leased(deliveries=delivery), lease))
        print("ok" if outcome.ok else outcome.error, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
