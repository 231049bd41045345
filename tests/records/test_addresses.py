"""Addresses of stores, as SQLAlchemy of the version that is installed understands them."""

import pytest
from sqlalchemy.engine import make_url

from amp_track.records import addresses


@pytest.mark.parametrize(
    "url",
    ["sqlite:///a.db", "sqlite:////tmp/a b.db", "sqlite:///a%20b.db", "sqlite:///a%2Fb.db", "sqlite:///a.db?timeout=3"],
)
def test_the_file_of_an_address_is_the_one_that_sqlalchemy_opens(url: str) -> None:
    assert str(addresses.sqlite_file(url)) == make_url(url).database


@pytest.mark.parametrize("url", ["postgresql://me@host/name", "http://127.0.0.1:5000", "sqlite://"])
def test_other_addresses_have_no_file(url: str) -> None:
    assert addresses.sqlite_file(url) is None
