"""Layers, origins, and what is said of mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millpond.config.keys import KEYS
from millpond.config.load import Loaded, load
from millpond.config.settings import Address, Config
from millpond.model import StoreSettings

EVERYTHING = """
data = "pond"
bind = ["127.0.0.1:7411", "unix:run/pond.sock", "[::1]:7410"]
allowed_hosts = ["Queue.Example.org", "q"]
insecure_no_tls = true

[tls]
cert = "cert.pem"
key = "key.pem"
client_ca = "ca.pem"

[limits]
body_bytes = "1MiB"
header_bytes = 4096
connections = 100
parked_leases = 50

[timeouts]
keep_alive = "1m30s"
header = 5
body = 60
shutdown = 0

[log]
format = "json"
level = "debug"
"""


def load_text(
    folder: Path, text: str, environment: dict[str, str] | None = None, flags: dict[str, str | list[str]] | None = None
) -> Loaded:
    (folder / "pond.toml").write_text(text)
    return load(str(folder / "pond.toml"), flags or {}, environment or {})


def told(loaded: Loaded, folder: Path) -> list[str]:
    return [str(problem).replace(f"{folder}/", "") for problem in loaded.problems]


def test_without_anything_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = load(None, {}, {})
    assert loaded.problems == []
    assert loaded.config == Config(data=tmp_path / ".local/share/millpond")
    assert set(loaded.origins.values()) == {"default"}


def test_a_file_in_its_usual_place_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = tmp_path / ".config/millpond/millpond.toml"
    usual.parent.mkdir(parents=True)
    usual.write_text("insecure_no_tls = true")
    loaded = load(None, {}, {})
    assert loaded.config.insecure_no_tls
    assert loaded.origins["insecure_no_tls"] == f"{usual}:1"


def test_every_key_can_be_set_in_the_file_and_paths_start_from_it(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).touch(0o600)
    loaded = load_text(tmp_path, EVERYTHING)
    assert loaded.problems == []
    config = loaded.config
    assert config.data == tmp_path / "pond"
    assert config.bind == (Address("127.0.0.1", 7411), Address(path=f"{tmp_path}/run/pond.sock"), Address("::1", 7410))
    assert config.allowed_hosts == ("queue.example.org", "q")
    assert config.tls.client_ca == tmp_path / "ca.pem"
    assert (config.limits.body_bytes, config.limits.parked_leases) == (1 << 20, 50)
    assert (config.timeouts.keep_alive, config.timeouts.header, config.timeouts.shutdown) == (90.0, 5.0, 0.0)
    assert (config.log.format, config.log.level) == ("json", "debug")
    assert "default" not in loaded.origins.values()


def test_flags_go_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    text = "[log]\nlevel = 'error'\nformat = 'json'\n[limits]\nconnections = 20_000"
    environment = {"MILLPOND_LOG_LEVEL": "warning", "MILLPOND_LOG_FORMAT": "console"}
    loaded = load_text(tmp_path, text, environment, flags={"log.level": "debug"})
    assert (loaded.config.log.level, loaded.config.log.format) == ("debug", "console")
    assert loaded.config.limits.connections == 20_000
    assert loaded.origins["log.level"] == "--log-level"
    assert loaded.origins["log.format"] == "MILLPOND_LOG_FORMAT"
    assert loaded.origins["limits.connections"] == f"{tmp_path}/pond.toml:5"


def test_the_environment_has_a_variable_for_every_key() -> None:
    texts = {
        "limits.body_bytes": "2 MiB",
        "bind": "127.0.0.1:1, unix:/x",
        "allowed_hosts": "a,b",
        "insecure_no_tls": "1",
    }
    environment = {key.variable: texts[key.name] for key in KEYS if key.name in texts} | {
        "MILLPOND_TIMEOUTS_HEADER": "3"
    }
    config = load(None, {}, environment).config
    assert config.limits.body_bytes == 2 << 20
    assert [str(address) for address in config.bind] == ["127.0.0.1:1", "unix:/x"]
    assert config.allowed_hosts == ("a", "b")
    assert config.insecure_no_tls
    assert config.timeouts.header == 3.0


def test_a_variable_of_nothing_is_not_set() -> None:
    assert load(None, {}, {"MILLPOND_BIND": ""}).config.bind == Config().bind


def test_a_variable_that_looks_like_a_typo_is_warned_of_and_others_are_let_be() -> None:
    # Kubernetes sets the second kind for every service that is named millpond.
    environment = {"MILLPOND_LOG_LEVLE": "debug", "MILLPOND_PORT": "tcp://10.0.0.1:7410", "MILLPOND_SERVICE_HOST": "x"}
    loaded = load(None, {}, environment)
    assert loaded.problems == []
    [warning] = loaded.warnings
    assert warning == "MILLPOND_LOG_LEVLE is no variable of millpond and is ignored; did you mean MILLPOND_LOG_LEVEL?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bnid = 'x'", "pond.toml:1: bnid is no key of millpond; did you mean 'bind'?"),
        (
            "\n[limits]\nbody_byte = 1",
            "pond.toml:3: limits.body_byte is no key of millpond; did you mean 'limits.body_bytes'?",
        ),
        ("cert = 'x'", "pond.toml:1: cert is no key of millpond; did you mean 'tls.cert'?"),
        ("[limit]\nconnections = 1", "pond.toml:1: limit is no table of millpond; did you mean 'limits'?"),
        ("log = 'json'", "pond.toml:1: log is 'json'; it is a table, write [log] and its keys below"),
        ("stores = 'a'", "pond.toml:1: stores is 'a'; write [[stores]] and its keys below"),
        ("[stores]\nname = 'a'", "pond.toml:1: stores is a table; write [[stores]] and its keys below"),
        ("bind = [\n  '127.0.0.1:1',\n  ':2',\n]", "pond.toml:3: bind is ':2'; say where to listen"),
        ("bind = []", "pond.toml:1: bind is empty; write at least one address, like '127.0.0.1:7410'"),
        ("bind = 7410", "pond.toml:1: bind is 7410; write an address, like '127.0.0.1:7410', or an array of them"),
        ("bind = [7410]", "pond.toml:1: bind has 7410 in it; write an address, like '127.0.0.1:7410'"),
        ("bind = ['a:1', \n'a:1']", "pond.toml:2: bind names a:1 twice; write it once"),
        (
            "bind = ['::1:7410']",
            "pond.toml:1: bind is '::1:7410'; write an IPv6 address in brackets, like '[::1]:7410'",
        ),
        ("bind = 'http://a:1'", "pond.toml:1: bind is 'http://a:1', a URL; write only the address"),
        ("bind = 'a:99999'", "pond.toml:1: bind is 'a:99999', whose port is no number from 0 to 65535"),
        ("bind = '7410'", "pond.toml:1: bind is '7410'; say where to listen too, like '127.0.0.1:7410'"),
        ("bind = '1.2.3:80'", "pond.toml:1: bind is '1.2.3:80', which is no address"),
        ("bind = 'unix:'", "pond.toml:1: bind is 'unix:'; write the path of a socket behind it"),
        ("insecure_no_tls = 'maybe'", "pond.toml:1: insecure_no_tls is 'maybe'; write true or false"),
        ("data = ''", "pond.toml:1: data is ''; write a path"),
        ("data.x = 1", "pond.toml:1: data is a table; write a path"),
        ("allowed_hosts = 'a:80'", "pond.toml:1: allowed_hosts is 'a:80'; write a host's name without port"),
        ("[log]\nlevel = 'inof'", "pond.toml:2: log.level is 'inof'; did you mean 'info'?"),
        ("[log]\nlevel = 3", "pond.toml:2: log.level is 3; use debug or info or warning or error"),
        (
            "limits.connections = true",
            "pond.toml:1: limits.connections is true; write a whole number from 1 to 1000000",
        ),
        ("limits.connections = 0", "pond.toml:1: limits.connections is 0; use 1 to 1000000"),
        (
            "limits.body_bytes = '16 MBit'",
            "pond.toml:1: limits.body_bytes is '16 MBit'; write a number of bytes, or '16MiB'",
        ),
        ("limits.body_bytes = 5", "pond.toml:1: limits.body_bytes is 5; use 1KiB to 1GiB"),
        ("timeouts.header = 'soon'", "pond.toml:1: timeouts.header is 'soon', which is no duration"),
        ("timeouts.header = '10h'", "pond.toml:1: timeouts.header is 36000 s; use 0.1 to 3600 s"),
        ("timeouts.header = nan", "pond.toml:1: timeouts.header is nan s, which is no duration"),
        ("tls.cert = 'pond.toml'", "pond.toml:1: tls.cert is set without tls.key; set both or neither"),
        ("data = 'pond.toml'", "which is no directory; name a directory"),
        ("a = 1\nb = x", "pond.toml:2: this is no TOML (Invalid value); mend the line"),
        ("a = [1,\n2", "pond.toml:2: this is no TOML"),
        ("data = 'a'\ndata = 'b'", "pond.toml:2: this is no TOML (Cannot overwrite a value); mend the line"),
        ("x = " + "[" * 5000, "pond.toml"),
    ],
)
def test_a_mistake_names_its_line_its_key_and_what_to_do(tmp_path: Path, text: str, expected: str) -> None:
    found = told(load_text(tmp_path, text), tmp_path)
    assert any(expected in problem for problem in found), found


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = "bnid = 1\n[log]\nlevel = 'x'\n[tls]\nkey = '/nowhere'\n"
    loaded = load_text(tmp_path, text, {"MILLPOND_LIMITS_CONNECTIONS": "many"}, {"bind": [":1"]})
    assert [problem.split(":")[0:2] for problem in told(loaded, tmp_path)] == [
        ["pond.toml", "1"],
        ["pond.toml", "3"],
        ["MILLPOND_LIMITS_CONNECTIONS", " limits.connections is 'many'; write a whole number from 1 to 1000000"],
        ["--bind", " bind is '"],
        ["pond.toml", "5"],
        ["pond.toml", "5"],
    ]
    assert [problem.line for problem in loaded.problems] == [1, 3, None, None, 5, 5]


def test_a_wrong_value_is_told_also_where_a_flag_goes_over_it(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "[log]\nlevel = 'x'", flags={"log.level": "debug"})
    assert len(loaded.problems) == 1


def test_a_file_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    [problem] = load(str(tmp_path / "gone.toml"), {}, {}).problems
    assert "gone.toml: cannot be read (No such file or directory)" in str(problem)


def test_a_file_that_is_no_text_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "pond.toml").write_bytes(b"# fine\ndata = '\xff'\n")
    [problem] = load(str(tmp_path / "pond.toml"), {}, {}).problems
    assert problem.line == 2
    assert "is not UTF-8" in problem.text


def test_lines_are_counted_in_files_of_any_system(tmp_path: Path) -> None:
    (tmp_path / "pond.toml").write_bytes(b"\xef\xbb\xbf# first\r\nbnid = 1\r\n")
    [problem] = load(str(tmp_path / "pond.toml"), {}, {}).problems
    assert problem.line == 2


def test_what_is_allowed_but_unwise_is_a_warning(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    os.chmod(tmp_path / "key.pem", 0o644)
    text = "insecure_no_tls = true\ntls = {cert = 'cert.pem', key = 'key.pem'}\nlimits.connections = 8000"
    loaded = load_text(tmp_path, text)
    assert loaded.problems == []
    assert len(loaded.warnings) == 3


def test_the_page_on_configuration_has_every_key() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
    keys, stores = page.read_text().split("## Stores")
    rows = [line.split("|") for line in keys.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): row[3].strip() for row in rows} == {key.name: key.about for key in KEYS}
    rows = [line.split("|") for line in stores.splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == list(StoreSettings.__struct_fields__)


def test_the_examples_on_the_page_are_right(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "config.md").read_text()
    for example in page.split("```toml\n")[1:]:
        assert load_text(tmp_path, example.split("```")[0]).problems == []


def test_a_working_directory_that_is_gone_matters_to_relative_paths_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(None, {"data": "pond"}, {}).config.data == tmp_path / "pond"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert load(None, {}, {"MILLPOND_DATA": str(tmp_path)}).config.data == tmp_path
    with pytest.raises(FileNotFoundError):
        load(None, {"data": "pond"}, {})
