"""Logs of commands: what is kept of an output, where it is, who reads it and when it goes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from millpond.errors import InvalidRequest, NotFound
from millpond.worker.capture import TAIL_BYTES, Capture
from millpond.worker.logs import Logs, follow, read, shelf_of

DAY = 86_400.0


def captured(folder: Path, *chunks: bytes, attempt: int = 1, head_bytes: int = 1_000) -> Capture:
    capture = Capture(str(folder), attempt, head_bytes)
    for chunk in chunks:
        capture.take(chunk)
    capture.close()
    return capture


def written(capture: Capture) -> bytes:
    assert capture.path is not None
    return Path(capture.path).read_bytes()


# ---- what is kept -------------------------------------------------------------------------------------------


def test_a_command_that_prints_nothing_leaves_no_file(tmp_path: Path) -> None:
    assert captured(tmp_path / "logs").path is None
    assert list(tmp_path.iterdir()) == []


def test_all_folders_of_a_log_are_private(tmp_path: Path) -> None:
    captured(tmp_path / "jobs@pond1" / "j1", b"out\n")
    for folder in (tmp_path / "jobs@pond1", tmp_path / "jobs@pond1" / "j1"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_short_output_is_kept_whole_and_private(tmp_path: Path) -> None:
    capture = captured(tmp_path / "a" / "b", b"one\n", b"two\n")
    assert written(capture) == b"one\ntwo\n"
    assert capture.last == b"one\ntwo\n"
    assert os.stat(str(capture.path)).st_mode & 0o077 == 0


def test_of_a_long_output_the_head_and_the_end_are_kept_and_a_line_says_what_is_not(tmp_path: Path) -> None:
    middle, end = b"m" * 5_000, b"e" * TAIL_BYTES
    capture = captured(tmp_path, b"h" * 1_000, middle, end)
    assert written(capture) == b"h" * 1_000 + b"\n[millpond: 5000 bytes were dropped here]\n" + end
    assert capture.last == end[-2_048:]


def test_an_output_that_just_fits_has_no_such_line(tmp_path: Path) -> None:
    output = bytes(1_000 + TAIL_BYTES)
    assert written(captured(tmp_path, output[:700], output[700:])) == output


def test_an_attempt_that_comes_again_gets_a_file_of_its_own(tmp_path: Path) -> None:
    assert [Path(str(captured(tmp_path, b"x").path)).name for _ in range(3)] == ["1.log", "1-2.log", "1-3.log"]


def test_a_full_disk_stops_the_log_and_not_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture(str(tmp_path), 1, 1_000)
    capture.take(b"before\n")
    room = 3
    real = os.write

    def full(file: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count, room = real(file, data[:room]), 0
        return count

    monkeypatch.setattr(os, "write", full)
    capture.take(b"during\n")
    capture.take(b"after\n")
    monkeypatch.undo()
    capture.close()
    note = (
        f"[millpond: the log {capture.path} could not be written (No space left on device); 0 bytes were dropped here]"
    )
    assert written(capture) == f"before\ndur\n{note}\ning\nafter\n".encode()
    assert capture.last.endswith(b"during\nafter\n")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    capture = captured(tmp_path / "file" / "deeper", b"lost\n")
    assert capture.path is None
    assert "Not a directory" in str(capture.problem)
    assert capture.last == b"lost\n"


# ---- where they are -----------------------------------------------------------------------------------------


def test_no_queue_or_id_leads_out_of_the_folder_or_into_anothers(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    names = [("jobs", "x"), ("jobs/x", "1.log"), ("jobs", ".."), ("jobs", "."), ("a/b", "c"), ("a", "b"), ("a.b", "c")]
    folders = [logs.folder(shelf_of(queue, "one"), id) for queue, id in names]
    folders.append(logs.folder(shelf_of("jobs", "two"), "x"))  # a queue of the same name, in another pond
    assert len(set(folders)) == len(folders)
    assert all(folder.resolve().parent.parent == tmp_path for folder in folders)


def test_attempts_are_listed_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    folder = logs.folder("jobs", "j")
    for order, attempt in enumerate([1, 2, 1]):  # the last: retried by hand
        os.utime(str(captured(folder, b"x", attempt=attempt).path), (order, order))
    (folder / "notes.txt").touch()
    assert [log.path.name for log in logs.attempts("jobs", "j")] == ["1.log", "2.log", "1-2.log"]
    latest, second = logs.latest("jobs", "j"), logs.latest("jobs", "j", attempt=2)
    assert latest is not None
    assert latest.path.name == "1-2.log"
    assert second is not None
    assert second.path.name == "2.log"
    assert logs.latest("jobs", "other") is None


def test_a_place_for_logs_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="cannot write logs to"):
        Logs(tmp_path / "file" / "logs").prepare()


# ---- reading and following ----------------------------------------------------------------------------------


def test_a_log_is_read_whole_or_from_near_its_end(tmp_path: Path) -> None:
    path = Path(str(captured(tmp_path, b"0123456789").path))
    assert b"".join(read(path)) == b"0123456789"
    assert b"".join(read(path, last_bytes=3)) == b"789"
    with pytest.raises(NotFound, match="is gone"):
        list(read(tmp_path / "2.log"))


def test_a_log_is_followed_until_its_writer_lets_go_of_it(tmp_path: Path) -> None:
    capture = Capture(str(tmp_path), 1)
    capture.take(b"one")
    steps = iter([lambda: capture.take(b"two"), capture.close])
    assert b"".join(follow(Path(str(capture.path)), pause=lambda _: next(steps)())) == b"onetwo"
    assert next(steps, None) is None


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    pauses = 0

    def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            captured(logs.folder("jobs", "j"), b"late")

    assert b"".join(logs.follow("jobs", "j", is_over=lambda: False, pause=pause)) == b"late"


def test_a_log_that_is_being_made_is_waited_for(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    folder = logs.folder("jobs", "j")
    folder.mkdir(parents=True)
    path = folder / "1.log"
    path.touch()  # its writer has not come to its lock
    assert logs.latest("jobs", "j") is None

    def pause(_: float) -> None:
        path.write_bytes(b"late")

    assert list(logs.follow("jobs", "j", is_over=lambda: False, pause=pause)) == [b"late"]


def test_a_job_that_ends_without_a_log_is_not_followed_for_ever(tmp_path: Path) -> None:
    over = iter([False, True])
    assert list(Logs(tmp_path).follow("jobs", "j", is_over=lambda: next(over), pause=lambda _: None)) == []


# ---- removal ------------------------------------------------------------------------------------------------


def test_old_logs_go_with_their_folders_and_fresh_ones_stay(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    now = 100 * DAY
    for id, age in [("old", 8 * DAY), ("fresh", 6 * DAY)]:
        os.utime(str(captured(logs.folder("jobs", id), b"x").path), (now - age, now - age))
    os.utime(str(captured(logs.folder("other", "old"), b"x").path), (0, 0))
    assert logs.run_once(now) == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["jobs", "fresh", "1.log"]


def test_the_log_of_a_silent_command_that_still_runs_stays(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    capture = Capture(str(logs.folder("jobs", "j")), 1)
    capture.take(b"x")
    os.utime(str(capture.path), (0, 0))
    assert logs.run_once(100 * DAY) == 0
    capture.close()
    assert logs.run_once(100 * DAY) == 1
    assert logs.run_once(100 * DAY) == 0


def test_a_log_without_a_folder_to_be_removed_from_is_no_error(tmp_path: Path) -> None:
    assert Logs(tmp_path / "none").run_once(0) == 0


def test_the_writer_of_a_log_holds_its_lock(tmp_path: Path) -> None:
    capture = Capture(str(tmp_path), 1)
    capture.take(b"x")
    with open(str(capture.path)) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    capture.close()
