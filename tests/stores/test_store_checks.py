from pathlib import Path

import pytest

from amp_track.records.errors import BadInput
from amp_track.stores import store_checks
from amp_track.stores.addresses import StoreAddress


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://host/x?user=me&password=hunter2", "got foo://host/x"),
        ("http://user:hunter2@127.0.0.1:9", "expected a database address such as"),
        (
            "postgresql+pg8000://user:hunter2@host/x",
            r"no driver for this one \(.*pg8000.*\)\. .* pip install 'psycopg\[binary\]'",
        ),
    ],
)
def test_what_cannot_be_opened_is_rejected_without_its_password(url: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        store_checks.check_storage(StoreAddress.parse(url))
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("content", [b"epoch 1: loss 0.3", b"\0" * 99, b'{"loss": 0.3}\n', b"SQLite format 3\0"])
def test_a_log_of_another_kind_is_rejected_and_stays_as_it_is(content: bytes) -> None:
    file = Path("train.log")
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"^--storage: got train\.log, which is not an Optuna journal"):
        store_checks.check_storage(StoreAddress.parse("train.log"))
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("folder.log", "is a folder"),
        ("loop.log", "cannot be opened|symbolic link"),
        ("link.log", "symbolic link. Use its target .*/optuna.log"),
    ],
)
def test_a_journal_that_cannot_be_opened_is_rejected(url: str, message: str) -> None:
    Path("folder.log").mkdir()
    Path("loop.log").symlink_to("loop.log")
    Path("link.log").symlink_to("optuna.log")
    with pytest.raises(BadInput, match=message):
        store_checks.check_storage(StoreAddress.parse(url))
    with pytest.raises(BadInput, match="expected a database address"):
        store_checks.check_tracking(StoreAddress.parse(url))


@pytest.mark.parametrize(
    "content", [None, b"", b'{"op_code":0,"worker_id":"x","study_name":"s","directions":[1]}\n', b'{"op']
)
def test_a_journal_new_or_begun_is_fine(content: bytes | None) -> None:
    if content is not None:
        Path("optuna.log").write_bytes(content)
    store_checks.check_storage(StoreAddress.parse("optuna.log"))
    assert Path("optuna.log").exists() == (content is not None)


@pytest.mark.parametrize("other", ["sqlite+pysqlite:///x.db", "sqlite:///./x.db", "sqlite:///x.db?timeout=5"])
def test_a_file_is_the_same_however_its_address_is_written(other: str) -> None:
    with pytest.raises(BadInput, match="also MLflow's store"):
        store_checks.check_stores(StoreAddress.parse("sqlite:///x.db"), StoreAddress.parse(other))
