"""Settings of the server and its API keys: what is read, from where first, and how it refuses."""

import dataclasses
from pathlib import Path

import pytest

from kvlingo.errors import BadInput
from kvlingo.serve.keys import Keys, Rate, digest_of
from kvlingo.serve.settings import READERS, Settings, read_settings


def test_every_setting_has_a_reader() -> None:
    assert set(READERS) == {field.name for field in dataclasses.fields(Settings)}


def test_flags_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kvlingo.toml"
    file.write_text('host = "localhost"\nport = 1\nmax_tokens = 11\n[models]\nsmall = "a"\n')
    environment = {"KVLINGO_PORT": "2", "KVLINGO_MAX_TOKENS": "12", "KVLINGO_RATE_PER_MINUTE": "7", "KVLINGO_KEYS": ""}
    settings, origin = read_settings({"port": 3, "models": [], "drain_s": None}, environment, file)
    assert (settings.host, settings.port, settings.max_tokens) == ("localhost", 3, 12)
    assert (settings.rate_per_minute, settings.models, settings.drain_s) == (7, {"small": "a"}, 30.0)
    assert origin["port"] == "the command line"
    assert origin["max_tokens"] == "the environment"
    assert origin["host"] == str(file)
    assert "drain_s" not in origin


def test_lists_and_tables_from_the_environment() -> None:
    environment = {"KVLINGO_MODELS": "small=./a, big=org/b", "KVLINGO_TRANSLATORS": "x,y", "KVLINGO_ANYONE": "yes"}
    settings, _ = read_settings({}, environment)
    assert settings.models == {"small": "./a", "big": "org/b"}
    assert settings.translators == (Path("x"), Path("y"))
    assert settings.anyone


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": 70000}, "65535 or less"),
        ({"max_tokens": 0}, "1 or more"),
        ({"models": ["small"]}, "NAME=MODEL"),
        ({"models": ["a=x", "a=y"]}, "each name once"),
        ({"host": "0.0.0.0"}, "--keys FILE"),
        ({"drain_s": -1.0}, "above 0"),
        ({"cache_disk_bytes": 5}, "--cache-dir"),
        ({"cache_dir": Path("x"), "cache_disk_bytes": 0}, "1 or more"),
        ({"keepalive_s": float("nan")}, "above 0"),
        ({"port": True}, "whole number"),
    ],
)
def test_a_bad_value_is_one_line_that_says_what_to_give(flags: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_settings(flags, {})


@pytest.mark.parametrize(
    ("text", "words"), [("prot = 1", "not a setting"), ("port = ", "not TOML"), ('port = "x"', "whole number")]
)
def test_a_bad_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "kvlingo.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=words):
        read_settings({}, {}, file)


def test_a_bad_environment_value_names_where_it_stands() -> None:
    with pytest.raises(BadInput, match="port is 'x' in the environment"):
        read_settings({}, {"KVLINGO_PORT": "x"})


def test_the_network_is_served_with_keys_or_when_told(tmp_path: Path) -> None:
    assert Settings(host="0.0.0.0", keys=tmp_path).host == Settings(host="0.0.0.0", anyone=True).host


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_file_names_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# keys\n\nalice: {digest_of('sk-a')}\nbob={digest_of('sk-b').upper()}\n")
    keys = Keys.read(file)
    assert keys.tenant("Bearer sk-a") == "alice"
    assert keys.tenant("bearer  sk-b ") == "bob"
    for wrong in (
        None,
        "",
        "sk-a",
        "Basic sk-a",
        "Bearer",
        "Bearer sk-",
        "Bearer sk-aa",
        f"Bearer {digest_of('sk-a')}",
    ):
        assert keys.tenant(wrong) is None


@pytest.mark.parametrize("line", ["sk-in-the-clear", "alice: 12", f"a b: {digest_of('x')}", ""])
def test_a_bad_key_file_is_refused_and_its_line_not_repeated(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(BadInput, match="NAME: SHA256") as caught:
        Keys.read(file)
    assert not line or line not in str(caught.value)


def test_one_name_or_key_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice: {digest_of('a')}\nalice: {digest_of('b')}\n")
    with pytest.raises(BadInput, match="each once"):
        Keys.read(file)


def test_a_rate_is_per_tenant_and_fills_up_again() -> None:
    now = 0.0
    rate = Rate(2, clock=lambda: now)
    assert [rate.wait_s("a") for _ in range(3)] == [0.0, 0.0, 30.0]
    assert rate.wait_s("b") == 0.0
    now = 29.0
    assert rate.wait_s("a") == pytest.approx(1.0)
    now = 30.0
    assert rate.wait_s("a") == 0.0
    now = 3000.0  # it never holds more than a minute's worth
    assert [rate.wait_s("a") for _ in range(3)][-1] > 0
