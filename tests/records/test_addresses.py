"""Addresses of stores, as SQLAlchemy of the version that is installed understands them."""

from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from amp_track.records import addresses


@pytest.mark.parametrize(
    "url",
    ["sqlite:///a.db", "sqlite:////tmp/a b.db", "sqlite:///a%20b.db", "sqlite:///a%2Fb.db", "sqlite:///a.db?timeout=3"],
)
def test_the_file_of_an_address_is_the_one_that_sqlalchemy_opens(url: str) -> None:
    assert str(addresses.sqlite_file(url)) == make_url(url).database


@pytest.mark.parametrize("url", ["optuna.log", "/shared/a b%20@c.log", "./x/y.log"])
def test_a_path_that_ends_in_log_is_a_journal(url: str) -> None:
    assert addresses.journal_file(url) == addresses.store_file(url) == Path(url)
    assert addresses.masked(url) == url
    assert addresses.spool_folder(url) == Path(addresses.SPOOL), "that of a machine is its own"


@pytest.mark.parametrize("url", ["sqlite:///optuna.log", "postgresql://me@host/name.log", "optuna.db"])
def test_another_address_is_no_journal(url: str) -> None:
    assert addresses.journal_file(url) is None


@pytest.mark.parametrize("url", ["postgresql://me@host/name", "http://127.0.0.1:5000", "sqlite://"])
def test_other_addresses_have_no_file(url: str) -> None:
    assert addresses.sqlite_file(url) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://me:hunter2@host:1/x", "http://me:***@host:1/x"),
        ("http://me:hun@ter2@host:1", "http://me:***@host:1"),
        ("postgresql+psycopg://me:@hunter2@host/x", "postgresql+psycopg://me:***@host/x"),
        ("postgresql://me:hun/ter2@host/x", "postgresql://me:***@host/x"),
        ("http://host/x?token=hunter2&a=b", "http://host/x?a=b&token=***"),
        ("postgresql://host/x?sslpassword=hunter2", "postgresql://host/x?sslpassword=***"),
        ("http://host/a?b=c", "http://host/a?b=c"),
        ("postgresql://me:hun@t/er2@host/db", "postgresql://***@host/db"),
        ("://me:hunter2@host", "host"),
    ],
)
def test_no_password_is_shown(url: str, expected: str) -> None:
    assert addresses.masked(url) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("got http://me:hunter2@host/x, expected", "got http://me:***@host/x, expected"),
        ("got http://me:hun@ter2@host, expected", "got http://me:***@host, expected"),
        ("http://hunter2@host and a@b", "http://***@host and a@b"),
        ("mail a@b", "mail a@b"),
        ("postgresql://me:hun/ter2@host/x", "postgresql://me:***@host/x"),
        ("postgresql://host/x?user=me&password=hunter2 is", "postgresql://host/x?user=me&password=*** is"),
        ("http://host:80/a, http://me:hunter2@host", "http://host:80/a, http://me:***@host"),
    ],
)
def test_no_password_is_shown_within_a_text(text: str, expected: str) -> None:
    assert addresses.masked_within(text) == expected


def test_the_folder_of_a_location() -> None:
    locations = ("/a/b", "file:///a%20b", "mlruns", "s3://bucket/a")
    found = [addresses.local_folder(location) for location in locations]
    assert [str(folder) for folder in found] == ["/a/b", "/a b", "mlruns", "None"]
