"""Every role at every call, by every way of asking; and what a running server makes of a changing tokens file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.access.roles import CALLS, COMMAND_KINDS, LISTS, OWN_QUEUES, ROLES, WHOLE, WORKER_KINDS, WORKERS_QUEUE
from millpond.access.tokens_file import TokensFile
from millpond.clock import ManualClock
from millpond.errors import Forbidden, MillpondError, Unauthorized, Unavailable
from millpond.http.auth import LOCAL, LOOK_EVERY_MS, Guard, Identity
from millpond.jobs import names
from millpond.wire.calls import CALLS as WIRE_CALLS

PAGES = {"metrics", "dashboard"}

# Written out once more, by hand: the table in roles.py is made of unions, and a slip there would go unseen.
ALLOWED = {
    "queues.create": "admin",
    "queues.update": "admin",
    "queues.delete": "admin",
    "queues.info": "consumer viewer operator admin",
    "queues.list": "viewer operator admin",
    "queue.produce": "producer operator admin",
    "queue.stage": "producer operator admin",
    "stage.publish": "producer operator admin",
    "stage.abort": "producer operator admin",
    "queue.lease": "consumer operator admin",
    "queue.subscribe": "consumer operator admin",
    "queue.complete": "consumer operator admin",
    "queue.retry": "consumer operator admin",
    "queue.extend": "consumer operator admin",
    "queue.state": "consumer operator admin",
    "queue.claim": "consumer operator admin",
    "claim.read": "consumer operator admin",
    "claim.verdict": "consumer operator admin",
    "claim.complete": "consumer operator admin",
    "claim.release": "consumer operator admin",
    "consumer.open": "consumer operator admin",
    "queue.stats": "viewer operator admin",
    "queue.audit": "viewer operator admin",
    "items.get": "viewer operator admin",
    "items.list": "viewer operator admin",
    "claims.list": "consumer viewer operator admin",
    "metrics": "viewer operator admin",
    "dashboard": "viewer operator admin",
    "queue.pause": "operator admin",
    "queue.resume": "operator admin",
    "queue.clear": "operator admin",
    "queue.redrive": "operator admin",
    "queue.cancel": "operator admin",
    "queue.bury": "operator admin",
    "queue.ready": "operator admin",
    "queue.rebalance": "operator admin",
    "journal.read": "operator admin",
}


class World:
    """A data directory, a clock, and a guard as a server on loopback has it."""

    def __init__(self, directory: Path, *, local: bool = True) -> None:
        self.clock = ManualClock()
        self.file = TokensFile(directory)
        self.local = local
        self.guard = self.started()

    def started(self) -> Guard:
        return Guard(self.file.path.parent, self.clock.now, open_to_local=self.local)

    def secret(self, role: str = "admin", queues: str = "*", **more: object) -> str:
        _, secret = self.file.create(self.clock.now(), role=role, queues=queues.split(), **more)  # type: ignore[arg-type]
        return secret

    def look(self) -> None:
        self.clock.advance(LOOK_EVERY_MS)

    def ask(self, secret: str) -> Identity:
        return self.guard.authenticate(f"Bearer {secret}".encode())

    def holder(self, role: str = "admin", queues: str = "*", **more: object) -> Identity:
        secret = self.secret(role, queues, **more)
        self.look()
        return self.ask(secret)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def allows(guard: Guard, identity: Identity, call: str, queue: str | None, *kinds: str) -> bool:
    try:
        guard.authorize(identity, call, queue, kinds)
    except Forbidden:
        return False
    return True


# ---- role x call x way of asking ----------------------------------------------------------------------------


def test_the_table_has_every_call_of_the_wire_and_the_pages() -> None:
    assert set(WIRE_CALLS) | PAGES == CALLS
    assert set(ALLOWED) == CALLS


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_make_its_calls_and_no_others(world: World, role: str) -> None:
    everywhere = world.holder(role, commands=True)
    narrow = world.holder(role, "team-a/*", commands=True)
    for call, roles in ALLOWED.items():
        may = role in roles.split()
        assert allows(world.guard, everywhere, call, "team-a/x") is may, call
        assert allows(world.guard, everywhere, call, None) is may, call
        assert allows(world.guard, narrow, call, "team-a/x") is may, call
        assert allows(world.guard, narrow, call, "team-b/x") is False, call
        assert allows(world.guard, narrow, call, None) is (may and call in LISTS), call


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", sorted(COMMAND_KINDS))
def test_jobs_need_a_permission_of_their_own_in_any_role(world: World, role: str, kind: str) -> None:
    plain, special = world.holder(role), world.holder(role, commands=True)
    may = role in ALLOWED["queue.produce"].split()
    for call in ("queue.produce", "queue.stage"):
        assert allows(world.guard, plain, call, "q", "", "email") is may
        assert allows(world.guard, plain, call, "q", "email", kind) is False
        assert allows(world.guard, special, call, "q", "email", kind) is may


@pytest.mark.parametrize("role", ROLES)
def test_who_may_lease_may_register_as_a_worker_and_do_no_more_there(world: World, role: str) -> None:
    narrow = world.holder(role, "team-a/*", commands=True)
    may = role in ALLOWED["queue.lease"].split()
    workers, schedules = "millpond/workers", "millpond/schedules"
    for call in ("queues.create", "queues.info", "items.get"):
        assert allows(world.guard, narrow, call, workers) is may
        assert allows(world.guard, narrow, call, schedules) is False
    assert allows(world.guard, narrow, "queue.produce", workers, "worker", "leash") is may
    for kinds in (["worker", "command"], ["task"], ["email"], []):
        assert allows(world.guard, narrow, "queue.produce", workers, *kinds) is False
    for call in CALLS - {"queues.create", "queues.info", "items.get", "queue.produce"} - LISTS:
        assert allows(world.guard, narrow, call, workers) is False
        assert allows(world.guard, narrow, call, schedules) is False
    assert allows(world.guard, narrow, "queue.produce", schedules, "command") is False


@pytest.mark.parametrize("role", ROLES)
def test_queues_of_our_own_are_made_by_who_works_with_them(world: World, role: str) -> None:
    own = world.holder(role, "jobs millpond/*")
    for queue in ("millpond/schedules", "millpond/links"):
        assert allows(world.guard, own, "queues.create", queue) is (role != "viewer")
        assert allows(world.guard, own, "queues.delete", queue) is (role == "admin")
    assert allows(world.guard, own, "queues.create", "millpond/mine") is (role == "admin")
    assert allows(world.guard, own, "queue.produce", "millpond/links", "command") is False


def test_our_own_queues_have_their_names_twice() -> None:
    assert set(names.SYSTEM_QUEUES) == OWN_QUEUES
    assert {names.WORKER, names.LEASH} == WORKER_KINDS
    assert names.WORKERS_QUEUE == WORKERS_QUEUE


def test_a_call_that_is_in_no_table_is_nobodys(world: World) -> None:
    assert not allows(world.guard, world.holder("admin"), "queues.burn", "q")
    assert not allows(world.guard, LOCAL, "queues.burn", "q")


def test_a_refusal_names_the_roles_that_may(world: World) -> None:
    viewer = world.holder("viewer", name="wall display")
    with pytest.raises(Forbidden) as caught:
        world.guard.authorize(viewer, "queue.produce", "q")
    assert caught.value.message == (
        f"token {viewer.id} (wall display) has role viewer, which may not call queue.produce;"
        " use a token of role producer or operator or admin"
    )
    assert caught.value.details["roles"] == ["producer", "operator", "admin"]


def test_a_refusal_says_what_to_do_about_queues(world: World) -> None:
    narrow = world.holder("operator", "team-a/* orders")
    for call, queue, word in [
        ("queue.stats", "team-b/x", "--queues match it"),
        ("queue.complete", None, "name the queue in `queue`"),
        ("metrics", None, "--queues '*'"),
    ]:
        with pytest.raises(Forbidden, match=r"for queues team-a/\*, orders") as caught:
            world.guard.authorize(narrow, call, queue)
        assert word in caught.value.message
    assert {"metrics"} == WHOLE


@pytest.mark.parametrize(
    ("patterns", "seen", "unseen"),
    [
        ("*", "a a/b a/b/c", ""),
        ("team-a/*", "team-a/x team-a/x/y", "team-a team-b/x Team-a/x xteam-a/x"),
        ("orders", "orders", "orders2 x/orders"),
        ("a? b[12]", "ab a1 b1 b2", "a b3 abc"),
        ("a.b", "a.b", "axb"),
    ],
)
def test_a_token_sees_the_queues_of_its_patterns(world: World, patterns: str, seen: str, unseen: str) -> None:
    identity = world.holder("viewer", patterns)
    assert [queue for queue in [*seen.split(), *unseen.split()] if identity.sees(queue)] == seen.split()


# ---- who asks -----------------------------------------------------------------------------------------------


def test_a_token_is_known_by_its_secret(world: World) -> None:
    secret = world.secret("producer", name="ci")
    world.look()
    identity = world.ask(secret)
    assert (identity.role, identity.name) == ("producer", "ci")
    assert secret.split("_")[2] not in repr(identity)


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {} ", "Bearer\t{}"])
def test_the_header_is_read_as_others_do(world: World, form: str) -> None:
    secret = world.secret()
    world.look()
    header = form.format(secret).encode()
    if "\t" in form:
        with pytest.raises(Unauthorized):
            world.guard.authenticate(header)
    else:
        assert world.guard.authenticate(header).role == "admin"


def wrong_headers(secret: str) -> Iterator[bytes]:
    other = secret[:-1] + ("0" if secret[-1] != "0" else "1")
    for text in (other, secret[:-1], secret + "x", secret.swapcase(), "mp_00000000_" + secret[12:], "", "x", "mp__"):
        yield f"Bearer {text}".encode()
    yield secret.encode()
    yield f"Basic {secret}".encode()
    yield b""
    yield b"Bearer \xff\xfe\x00"
    yield b"Bearer " + b"x" * 100_000
    yield f"Bearer {secret} {secret}".encode()
    yield f"Bearer {secret}\n".encode() + b"x"


def test_anything_else_is_unauthorized_and_is_not_repeated_in_the_answer(world: World) -> None:
    secret = world.secret()
    world.look()
    for header in wrong_headers(secret):
        with pytest.raises(Unauthorized) as caught:
            world.guard.authenticate(header)
        assert caught.value.challenge == 'Bearer realm="millpond", error="invalid_token"'
        assert secret[12:30] not in caught.value.message


def test_no_header_is_a_challenge_without_an_error(world: World) -> None:
    world.secret()
    world.look()
    with pytest.raises(Unauthorized, match="millpond token create") as caught:
        world.guard.authenticate(None)
    assert caught.value.challenge == 'Bearer realm="millpond"'


def test_an_expired_token_does_not_count_from_that_instant(world: World) -> None:
    secret = world.secret(expire_timeout_ms=60_000)
    world.look()
    world.clock.advance(60_000 - LOOK_EVERY_MS - 1)
    world.ask(secret)
    world.clock.advance(1)
    with pytest.raises(Unauthorized, match="has expired"):
        world.ask(secret)


# ---- a running server and its file ----------------------------------------------------------------------------


def test_without_tokens_this_machine_may_do_everything(world: World) -> None:
    identity = world.guard.authenticate(None)
    assert identity is LOCAL
    assert all(allows(world.guard, identity, call, None, *COMMAND_KINDS) for call in CALLS)
    assert world.guard.authenticate(b"Bearer nonsense") is LOCAL


def test_without_tokens_other_machines_may_do_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unauthorized):
        World(tmp_path, local=False).guard.authenticate(None)


def test_the_first_token_closes_an_open_server_within_seconds(world: World) -> None:
    assert world.guard.authenticate(None) is LOCAL
    world.secret()
    world.look()
    with pytest.raises(Unauthorized):
        world.guard.authenticate(None)


def test_a_revoke_counts_within_five_seconds(world: World) -> None:
    identity = world.holder("viewer")
    secret = world.secret("producer")
    world.look()
    world.ask(secret)
    world.file.revoke(secret, world.clock.now())
    world.file.revoke(identity.id, world.clock.now())
    assert LOOK_EVERY_MS <= 5_000
    world.look()
    with pytest.raises(Unauthorized, match="revoked"):
        world.ask(secret)


def test_revoking_the_last_token_or_deleting_the_file_opens_nothing(world: World) -> None:
    secret = world.secret()
    world.look()
    world.ask(secret)
    world.file.revoke(secret, world.clock.now())
    for guard in (world.guard, world.started()):
        world.look()
        with pytest.raises(Unauthorized):
            guard.authenticate(None)
    world.file.path.unlink()
    world.look()
    with pytest.raises(Unauthorized):
        world.guard.authenticate(None)


def test_the_file_is_not_looked_at_on_every_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    monkeypatch.setattr("millpond.http.auth._stamp", lambda path: looks.append(path))
    for _ in range(100):
        world.guard.authenticate(None)
        world.clock.advance(LOOK_EVERY_MS // 10)
    assert 9 <= len(looks) <= 10


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b'{"version": 2, "tokens": []}', b'{"version": 1}', b"\xff"])
def test_a_damaged_file_lets_nobody_in_until_it_is_mended(world: World, contents: bytes) -> None:
    secret = world.secret()
    whole = world.file.path.read_bytes()
    world.look()
    world.ask(secret)
    world.file.path.write_bytes(contents)
    for guard in (world.guard, world.started()):
        world.look()
        with pytest.raises(Unavailable) as caught:
            guard.authenticate(f"Bearer {secret}".encode())
        assert str(world.file.path) not in caught.value.message
    world.file.path.write_bytes(whole)
    world.look()
    assert world.ask(secret).role == "admin"


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    world = World(tmp_path / "file")  # a data directory that is none
    with pytest.raises(MillpondError):
        world.guard.authenticate(None)


def test_a_server_without_a_directory_is_as_open_as_it_is_told() -> None:
    clock = ManualClock()
    assert Guard(None, clock.now, open_to_local=True).authenticate(None) is LOCAL
    with pytest.raises(Unauthorized):
        Guard(None, clock.now, open_to_local=False).authenticate(None)


def test_what_a_token_has_seen_is_bounded(world: World) -> None:
    identity = world.holder("viewer", "team-a/*")
    for number in range(25_000):
        identity.sees(f"team-b/{number}")
    assert len(identity._seen) <= 10_000


def test_the_table_in_the_docs_is_this_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "secure-a-server.md"
    rows = [line.split("|")[1:-1] for line in page.read_text().splitlines() if line.startswith("| ")]
    head, *calls = [[cell.strip(" `") for cell in row] for row in rows]
    assert head == ["call", *ROLES]
    told = {call: [role for role, may in zip(ROLES, cells, strict=True) if may == "yes"] for call, *cells in calls}
    assert told == {call: roles.split() for call, roles in ALLOWED.items()}
