"""Errors of databases that are told in one line."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from amp_track.commands.request import Stores
from amp_track.commands.session.store_failures import in_one_line
from amp_track.records.errors import StoreFailed
from amp_track.tracking import private


def test_a_message_of_a_damaged_database_that_is_no_text_is_told(tmp_path: Path) -> None:
    """SQLite names what is damaged, whose bytes may be none of UTF-8: Python's own module then raises this."""

    def read(connection: sqlite3.Connection, record: object) -> None:
        b"malformed database schema (\x96uns)".decode()

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    event.listen(Engine, "connect", read)
    try:
        with (
            pytest.raises(StoreFailed, match="what it holds cannot be read") as raised,
            in_one_line(Stores(tracking_uri=uri)),
        ):
            private.has_tables(uri)
    finally:
        event.remove(Engine, "connect", read)
    assert str(raised.value).startswith(uri)
