"""Keys on disk: each machine gets what it needs, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from card.errors import SettingsError
from card.links.keys import check_address, is_loopback, load_client_keys, load_server_keys, make_keys


def test_a_server_and_its_client_get_keys_that_belong_together(tmp_path: Path) -> None:
    assert make_keys(tmp_path / "keys") == [tmp_path / "keys" / "server", tmp_path / "keys" / "client"]
    server = load_server_keys(tmp_path / "keys" / "server")
    client = load_client_keys(tmp_path / "keys" / "client")
    assert client.server == server.public
    assert client.public.decode() in (server.clients / "client.key").read_text()
    assert len({server.public, server.secret, client.public, client.secret}) == 4


def test_secrets_are_for_their_owner_alone_and_leave_the_server_never(tmp_path: Path) -> None:
    make_keys(tmp_path, ["ann", "bob"])
    secrets = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*secret*")}
    assert secrets == {"server/server.key_secret", "ann/client.key_secret", "bob/client.key_secret"}
    for path in secrets:
        assert (tmp_path / path).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / path).parent.stat().st_mode & 0o777 == 0o700
    assert all("secret" not in path.read_text() for path in (tmp_path / "server" / "clients").iterdir())


def test_a_client_can_be_added_later(tmp_path: Path) -> None:
    make_keys(tmp_path, ["ann"])
    before = load_server_keys(tmp_path / "server")
    assert make_keys(tmp_path, ["bob"]) == [tmp_path / "bob"]
    assert load_server_keys(tmp_path / "server") == before
    assert load_client_keys(tmp_path / "bob").server == before.public
    assert {path.name for path in before.clients.iterdir()} == {"ann.key", "bob.key"}


@pytest.mark.parametrize("clients", [[], ["ann"], ["bob", "ann"]])
def test_nothing_is_overwritten_and_nothing_half_made(tmp_path: Path, clients: list[str]) -> None:
    make_keys(tmp_path, ["ann"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match="exists already and is not overwritten"):
        make_keys(tmp_path, clients)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["", "server", "../x", "a/b", ".hidden"])
def test_a_name_that_is_no_folder_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="a client's name must be"):
        make_keys(tmp_path, [name])
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    make_keys(tmp_path)
    for load, folder, reason in [
        (load_server_keys, tmp_path, "give the folder that `card keys` made for a server"),
        (load_server_keys, tmp_path / "client", "made for a server"),
        (load_client_keys, tmp_path / "server", "made for a client"),
        (load_client_keys, tmp_path / "none", "made for a client"),
    ]:
        with pytest.raises(SettingsError, match=reason):
            load(folder)
    (tmp_path / "client" / "server.key").write_text("nonsense")
    with pytest.raises(SettingsError, match="no key can be read"):
        load_client_keys(tmp_path / "client")
    (tmp_path / "server" / "clients" / "client.key").unlink()
    with pytest.raises(SettingsError, match="holds no public key: no client could connect"):
        load_server_keys(tmp_path / "server")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://localhost:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://*:5555", False),
        ("tcp://192.168.1.20:5555", False),
        ("tcp://localhost.example.org:5555", False),
        ("tcp://[2001:db8::1]:5555", False),
    ],
)
def test_loopback_is_told_from_the_rest(address: str, expected: bool) -> None:
    assert is_loopback(check_address(address, binds=True)) is expected
