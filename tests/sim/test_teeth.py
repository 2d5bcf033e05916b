"""The simulator bites: with a bug put into the engine it finds a broken promise within a few seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from millpond.history.format import Event
from millpond.model import State
from millpond.queue import (
    claims,
    holders,
    lease,
    lifecycle,
    logical,
    operations,
    partition,
    settling,
    transfer,
    watching,
)
from millpond.queue.columns import IntColumn
from millpond.queue.dedup import Dedup
from millpond.queue.lane import Lane, LoadJob, TurnJob
from millpond.queue.logical import LogicalQueue
from millpond.queue.looking import look
from millpond.queue.partition import Partition
from millpond.queue.ready import Ready
from millpond.queue.requests import Forget
from millpond.queue.state import QueueState
from millpond.queue.timers import NEVER
from millpond.queue.tokens import Token
from tests.sim.run import run_seed

SEEDS = 40  # within which each must be found; most show in the first
OPS = 1_000

Patch = pytest.MonkeyPatch


def lease_expiry_is_not_counted(patch: Patch) -> None:
    def on_lease_expired(self: Partition, runs: Sequence[int]) -> None:
        self._return(runs, attempted=False)
        for run in runs:
            for first, count, priority in self._by_priority(run):
                self.ready.push(priority, first, count)

    patch.setattr(Partition, "on_lease_expired", on_lease_expired)


def completed_items_come_back(patch: Patch) -> None:
    def on_completed(self: Partition, client: str, pairs: Sequence[int], keep_until: int, with_result: int) -> None:
        self.on_lease_expired(pairs[::2])

    patch.setattr(Partition, "on_completed", on_completed)


def names_are_forgotten_by_a_load(patch: Patch) -> None:
    work = LoadJob.work

    def forgetful(self: LoadJob) -> None:
        work(self)
        assert self.partition is not None
        self.partition.dedup = Dedup()

    patch.setattr(LoadJob, "work", forgetful)


def items_of_callers_who_left_stay_leased(patch: Patch) -> None:
    patch.setattr(lease.ReleasePart, "apply", lambda self, lane, now: None)


def waiters_are_not_woken_by_what_falls_due(patch: Patch) -> None:
    def deaf(queue: QueueState, now: int) -> None:
        if now % 3:
            lease.assign_leases(queue, now)

    patch.setattr(logical, "assign_leases", deaf)


def timers_do_not_wake_the_queue(patch: Patch) -> None:
    patch.setattr(logical, "next_wake", lambda partition: None)


def deadlines_of_items_do_not_wake_the_queue(patch: Patch) -> None:
    def deaf(partition: Partition) -> int | None:
        heard = [timers.next_at for timers in partition.timers if timers is not partition.expiry_timers]
        at = min(partition.chunks.next_deadline() or NEVER, *heard)
        return at if at < NEVER else None

    patch.setattr(logical, "next_wake", deaf)


def any_token_of_an_item_is_as_good_as_another(patch: Patch) -> None:
    def held(self: holders.TokenPart, lane: Lane) -> Iterator[tuple[Token, bool]]:
        for token in self._tokens:
            found = lane.partition.leased.get(token[1])
            yield token, found is not None and self._request.at < found.deadline

    patch.setattr(holders.TokenPart, "_held", held)


def the_last_comes_first(patch: Patch) -> None:
    patch.setattr(Ready, "push", Ready.push_front)


def failed_commits_are_acknowledged(patch: Patch) -> None:
    def hopeful(self: LogicalQueue, lane: Lane, job: TurnJob, now: int) -> None:
        assert job.error is not None
        self._finish_parts(lane, job, now)
        lane.failed(job.error, now)

    patch.setattr(LogicalQueue, "_finish_failed", hopeful)


def the_dead_queue_forgets_what_has_arrived(patch: Patch) -> None:
    patch.setattr(transfer, "_arrived", lambda queue, names: set())


def transfers_are_forgotten_before_the_source_has_let_go(patch: Patch) -> None:
    def hasty(self: transfer.ConfirmPart, queue: QueueState, target: str, names: list[bytes]) -> None:
        queue.outbox.append(Forget(target, 0, names))
        self._queue, self._target, self._names = queue, target, names

    patch.setattr(transfer.ConfirmPart, "__init__", hasty)


def items_with_a_deadline_of_their_own_do_not_expire(patch: Patch) -> None:
    patch.setattr(lifecycle, "_expire_items", lambda queue, lane, now: lane.partition.expiry_timers.pop_due(now))


def attempts_are_not_limited(patch: Patch) -> None:
    patch.setattr(holders, "_fatal", lambda queue, lane, number, item, now: None)


def a_lease_in_doubt_is_never_answered(patch: Patch) -> None:
    patch.setattr(lease.LeasePart, "fail", lambda self, error: None)


def a_restart_forgets_the_state_documents(patch: Patch) -> None:
    work = LoadJob.work

    def forgetful(self: LoadJob) -> None:
        work(self)
        assert self.partition is not None
        self.partition.documents = IntColumn()

    patch.setattr(LoadJob, "work", forgetful)


def cancelling_a_leased_item_is_forgotten(patch: Patch) -> None:
    patch.setattr(Partition, "on_cancel_asked", lambda self, numbers: None)


def a_redrive_takes_what_was_completed(patch: Patch) -> None:
    everything = tuple(state for state in State if state != State.LEASED)
    patch.setattr(operations, "_LETTERS", everything)


def what_was_never_sealed_stays_claimed(patch: Patch) -> None:
    patch.setattr(settling, "_follow_claim", lambda queue, lane, hold, decisions, now: None)


def a_restart_turns_claims_around(patch: Patch) -> None:
    work = LoadJob.work

    def dizzy(self: LoadJob) -> None:
        work(self)
        assert self.partition is not None
        for hold in self.partition.claims.values():
            hold.runs.reverse()

    patch.setattr(LoadJob, "work", dizzy)


def a_restart_forgets_verdicts(patch: Patch) -> None:
    work = LoadJob.work

    def mild(self: LoadJob) -> None:
        work(self)
        assert self.partition is not None
        for hold in self.partition.claims.values():
            hold.judged.clear()

    patch.setattr(LoadJob, "work", mild)


def any_epoch_is_as_good_as_another(patch: Patch) -> None:
    patch.setattr(claims, "_fenced", lambda decisions, claim_id, epoch: None)


def claimed_items_expire(patch: Patch) -> None:
    within = partition.Partition.set_aside

    def set_aside(self: Partition, first: int, count: int) -> set[int]:
        return within(self, first, count).difference(self.claimed.within(first, count))

    patch.setattr(Partition, "set_aside", set_aside)


def verdicts_know_no_last_attempt(patch: Patch) -> None:
    patch.setattr(settling, "_fatal", lambda queue, partition, number, verdict, now: None)


def claims_are_not_woken(patch: Patch) -> None:
    patch.setattr(logical, "wake_readers", lambda queue, now: None)


def a_claim_is_completed_only_where_the_request_came_to(patch: Patch) -> None:
    patch.setattr(settling, "complete_in", lambda queue, lane, nonce, now: (0, 0, 0))


def every_copy_of_a_chunk_counts(patch: Patch) -> None:
    publish_in = settling.publish_in

    def generous(queue: QueueState, lane: Lane, txn: str, chosen: settling.Chosen, now: int) -> settling.Shown:
        return publish_in(queue, lane, txn, dict.fromkeys(chosen, lane.index), now)

    patch.setattr(settling, "publish_in", generous)


def a_published_transaction_is_forgotten_by_a_load(patch: Patch) -> None:
    work = LoadJob.work

    def forgetful(self: LoadJob) -> None:
        work(self)
        assert self.partition is not None
        self.partition.decisions.published.clear()
        self.partition.decisions.last_published.clear()

    patch.setattr(LoadJob, "work", forgetful)


def staged_names_are_not_looked_up(patch: Patch) -> None:
    patch.setattr(settling, "name_taken", lambda queue, record, names, now: False)


def what_is_staged_is_swept_too_early(patch: Patch) -> None:
    patch.setattr(settling, "_staged_at", lambda chunks: next(iter(chunks.values()))[0].at - 3_000)


def nobody_is_told_of_an_ending(patch: Patch) -> None:
    patch.setattr(logical, "tell_endings", lambda queue, lane: None)


def who_waits_for_an_ending_is_forgotten_by_a_load(patch: Patch) -> None:
    patch.setattr(logical, "look_after_load", lambda lane: None)


def what_ends_as_it_is_looked_at_is_missed(patch: Patch) -> None:
    def late(self: watching.Watch, number: int, lane: Lane, now: int) -> dict[int, Any]:
        return look(lane, [number])

    patch.setattr(watching.Watch, "look", late)


def a_restart_forgets_when_items_changed(patch: Patch) -> None:
    work = LoadJob.work

    def forgetful(self: LoadJob) -> None:
        work(self)
        assert self.partition is not None
        self.partition.changed = IntColumn()

    patch.setattr(LoadJob, "work", forgetful)


def dead_items_can_be_made_ready(patch: Patch) -> None:
    def eager(numbers: list[int], lane: Lane, now: int) -> dict[int, Any]:
        seen = look(lane, numbers)
        dead = [number for number in seen if seen[number].state == State.DEAD and number in lane.partition.dead]
        if dead:
            lane.partition.change(Event.DUE, dead)
        return seen

    patch.setattr(operations, "_ready_in", eager)


BUGS: list[Callable[[Patch], Any]] = [
    lease_expiry_is_not_counted,
    completed_items_come_back,
    names_are_forgotten_by_a_load,
    items_of_callers_who_left_stay_leased,
    waiters_are_not_woken_by_what_falls_due,
    timers_do_not_wake_the_queue,
    deadlines_of_items_do_not_wake_the_queue,
    any_token_of_an_item_is_as_good_as_another,
    the_last_comes_first,
    failed_commits_are_acknowledged,
    the_dead_queue_forgets_what_has_arrived,
    transfers_are_forgotten_before_the_source_has_let_go,
    items_with_a_deadline_of_their_own_do_not_expire,
    attempts_are_not_limited,
    a_lease_in_doubt_is_never_answered,
    a_restart_forgets_the_state_documents,
    cancelling_a_leased_item_is_forgotten,
    a_redrive_takes_what_was_completed,
    what_was_never_sealed_stays_claimed,
    a_restart_turns_claims_around,
    a_restart_forgets_verdicts,
    any_epoch_is_as_good_as_another,
    claimed_items_expire,
    verdicts_know_no_last_attempt,
    claims_are_not_woken,
    a_claim_is_completed_only_where_the_request_came_to,
    every_copy_of_a_chunk_counts,
    a_published_transaction_is_forgotten_by_a_load,
    staged_names_are_not_looked_up,
    what_is_staged_is_swept_too_early,
    nobody_is_told_of_an_ending,
    who_waits_for_an_ending_is_forgotten_by_a_load,
    what_ends_as_it_is_looked_at_is_missed,
    a_restart_forgets_when_items_changed,
    dead_items_can_be_made_ready,
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_found(bug: Callable[[Patch], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(1, SEEDS + 1):
        violation = run_seed((seed, OPS)).violation
        if violation is not None:
            print(f"seed {seed}: {violation.splitlines()[-1] if 'Traceback' in violation else violation}")
            return
    pytest.fail(f"{SEEDS} seeds did not find that {bug.__name__.replace('_', ' ')}")
