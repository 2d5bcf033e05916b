from __future__ import annotations

import json
from pathlib import Path

from tests.spark.cluster import WHO_RUNS_WHAT, local_cluster, members, run_driver, standalone, submit, told


def test_a_local_cluster_runs_tasks_in_two_processes_beside_the_driver(tmp_path: Path) -> None:
    run_driver(WHO_RUNS_WHAT, tmp_path, json.dumps(local_cluster()))
    found = told(tmp_path)
    assert len({found["driver"], *found["executors"]}) == 3
    assert found["started_by"] == [found["driver"]] * 2


def test_what_is_submitted_to_a_standalone_cluster_runs_in_a_process_of_its_worker(tmp_path: Path) -> None:
    with standalone(tmp_path) as cluster:
        settings = cluster.settings() | {"spark.sql.session.timeZone": "Asia/Tokyo"}
        submit(WHO_RUNS_WHAT, tmp_path, settings, "{}")
        found = told(tmp_path)
        [worker] = cluster.workers
        assert found["started_by"] == [worker.pid] * 2
        assert found["driver"] not in found["executors"]
        assert settings.items() <= found["settings"].items()
        assert "mp_" in found["settings"]["spark.redaction.regex"]
    assert members(cluster.master.pid) == members(worker.pid) == []
