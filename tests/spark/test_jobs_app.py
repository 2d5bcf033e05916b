"""The jobs as an application: submitted to a cluster, and what it says of wrong questions."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millpond.spark.jobs import __main__ as app
from tests.spark.cluster import standalone, submit
from tests.spark.told import Told, write_lake


def test_a_job_runs_on_a_cluster(tmp_path: Path) -> None:
    lake, out = tmp_path / "lake", tmp_path / "out"
    write_lake(lake, Told().at(0).produce(1, 2).at(1).lease(1, who="ann").at(2).complete(1, who="ann"))
    asked = ("metrics", "--lake", str(lake), "--out", str(out), "--window", "1m")
    with standalone(tmp_path) as cluster:
        submit(Path(app.__file__).read_text(), tmp_path, cluster.settings(), *asked)
    [row] = pq.read_table(out).to_pylist()
    assert (row["queue"], row["produced"], row["completed"]) == ("mail", 2, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--window", "0s"], "--window is '0s'"),
        (["--since", "then"], "--since is 'then'"),
        (["--since", "1h", "--until", "2h"], "nothing lies between them"),
    ],
)
def test_a_wrong_question_is_told_before_spark_is_started(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["metrics", "--lake", "x", "--out", "y", *flags]) == 1
    assert words in capsys.readouterr().err
