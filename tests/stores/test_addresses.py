"""Store addresses, as the installed version of SQLAlchemy parses them."""

import contextlib
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from amp_track.records import masking
from amp_track.stores import addresses
from amp_track.stores.addresses import StoreAddress


@pytest.mark.parametrize(
    ("url", "kind", "file"),
    [
        ("sqlite:///x.db", "sqlite", "x.db"),
        ("sqlite:////tmp/a b.db", "sqlite", "/tmp/a b.db"),
        ("sqlite:///a%20b.db", "sqlite", make_url("sqlite:///a%20b.db").database),
        ("sqlite:///x.db?timeout=5", "sqlite", "x.db"),
        ("sqlite+pysqlite:///x.db", "sqlite", "x.db"),
        ("sqlite:///optuna.log", "sqlite", "optuna.log"),
        ("sqlite://", "memory", None),
        ("sqlite:///", "memory", None),
        ("sqlite:///:memory:", "memory", None),
        ("optuna.log", "journal", "optuna.log"),
        ("/shared/a b%20@c.log", "journal", "/shared/a b%20@c.log"),
        ("postgresql://me@host/name.log", "server", None),
        ("http://127.0.0.1:5000", "http", None),
        ("optuna.db", "invalid", None),
    ],
)
def test_the_kind_and_the_file_of_an_address(url: str, kind: str, file: str | None) -> None:
    address = StoreAddress.parse(url)
    assert (address.kind, address.file) == (kind, Path(file) if file is not None else None)
    assert str(address) == url
    assert kind != "sqlite" or make_url(url).database == file


def test_a_port_that_is_not_a_number_makes_an_address_invalid_and_shows_no_password() -> None:
    address = StoreAddress.parse("postgresql://me:hun@ter:2@host/x")  # an unescaped @
    assert (address.kind, str(address)) == ("invalid", "postgresql://me:***@host/x")


def test_machines_that_share_a_journal_have_an_outbox_each() -> None:
    assert StoreAddress.parse("/shared/optuna.log").outbox_folder == Path(addresses.OUTBOX)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://me:hunter2@host:1/x", "http://me:***@host:1/x"),
        ("http://me:hun@ter2@host:1", "http://me:***@host:1"),
        ("postgresql+psycopg://me:@hunter2@host/x", "postgresql+psycopg://me:***@host/x"),
        ("postgresql://me:hun@t/er2@host/db", "postgresql://me:***@host/db"),
        ("http://host/x?token=hunter2&a=b", "http://host/x?token=***&a=b"),
        ("postgresql://host/x?user=me&sslpassword=hunter2", "postgresql://host/x?user=me&sslpassword=***"),
        ("http://host:80/a?b=c", "http://host:80/a?b=c"),
        ("sqlite:////home/me@company/a.db", "sqlite:////home/me@company/a.db"),
    ],
)
def test_no_password_is_shown_alone_or_within_a_text(url: str, expected: str) -> None:
    assert masking.masked(url) == expected
    assert masking.masked_within(f"got {url} and\na@b") == f"got {expected} and\na@b"


def test_what_only_looks_like_an_address_shows_no_password() -> None:
    assert masking.masked("me:hunter2@host") == "host"
    assert masking.masked("postgresql://me@host/x") == "postgresql://me@host/x"
    assert masking.masked("postgresql://me:hun ter2@host/x") == "postgresql://me:***@host/x"
    assert masking.masked_within("http://hunter2@host:80/a") == "http://***@host:80/a"
    assert masking.masked_within("http://a/b,http://me:hunter2@host") == "http://a/b,http://me:***@host"


@pytest.mark.parametrize(
    ("address", "said", "expected"),
    [
        ("postgresql://me:hun@TER2@host/x", "no host 'TER2@host'", "no host '***@host'"),
        ("postgresql://me:hun@t/er2@host/db", 'no database "er2@host/db"', 'no database "***@host/db"'),
        ("postgresql://me:hun%40ter2@host", "hun@ter2 is wrong", "*** is wrong"),
        ("postgresql://host/x?password=hun%20ter2", "hun ter2 is wrong", "*** is wrong"),
        ("postgresql://me:hun ter2@host", "got postgresql://me:hun ter2@host", "got postgresql://me:***@host"),
        ("postgresql://optuna:optuna@host/optuna", "no database optuna", "no database optuna"),
        ("postgresql://me@host/x", "no user me at host", "no user me at host"),
    ],
)
def test_what_a_driver_says_shows_no_part_of_a_password(address: str, said: str, expected: str) -> None:
    assert masking.masked_within(said, masking.secrets_of(address)).startswith(expected)


def test_links_lead_to_the_ui_that_a_browser_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = StoreAddress.parse("sqlite:///mlflow.db"), StoreAddress.parse("http://me:hunter2@mlflow:5000/")
    assert [(store.ui, store.has_ui) for store in (local, remote)] == [
        ("http://127.0.0.1:5000", False), ("http://mlflow:5000", True),
    ]  # fmt: skip
    for value in ("https://mlflow.example/a", "https://mlflow.example/a/"):
        monkeypatch.setenv(addresses.UI_VARIABLE, value)
        assert [(store.ui, store.has_ui) for store in (local, remote)] == [("https://mlflow.example/a", True)] * 2


_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)
_SIMPLE = st.text(st.sampled_from("abcXYZ019-._"), min_size=1, max_size=12)


@given(user=_SIMPLE, password=st.one_of(_TEXT, st.text("ab@:/?#%4 ", max_size=30)), host=_SIMPLE)
def test_no_three_characters_of_a_password_are_shown(user: str, password: str, host: str) -> None:
    url = f"postgresql://{user}:{password}@{host}/name"
    texts = ["got {!r}, expected", "{}", "it said: no such thing as {!r}"]
    pieces = [url, password, unquote(password)]
    with contextlib.suppress(ArgumentError, ValueError):
        parsed = make_url(url)
        # Arguments of a driver. SQLAlchemy assigns the rest of a password that contains @ to these two.
        pieces += [str(part) for part in (parsed.password, parsed.host, parsed.database)]
    secrets = masking.secrets_of(url)
    shown = [masking.masked(url)]
    shown += [masking.masked_within(text.format(piece), secrets) for text in texts for piece in pieces]
    elsewhere = " ".join([*texts, f"postgresql://{user}:***@{host}/name", f"'{host}", f"{host}'"])
    for start in range(len(password) - 2):
        part = password[start : start + 3]
        assert part in elsewhere or not any(part in text for text in shown), (part, shown)


def test_the_folder_of_a_location() -> None:
    locations = ("/a/b", "file:///a%20b", "mlruns", "s3://bucket/a")
    found = [addresses.local_folder(location) for location in locations]
    assert [str(folder) for folder in found] == ["/a/b", "/a b", "mlruns", "None"]
