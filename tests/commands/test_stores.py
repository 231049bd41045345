"""Stores that cannot be used: one line, exit code 2, and not a byte of them changed."""

import os
import shlex
import shutil
import sqlite3
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support import WORKLOADS, Done

from amp_track.records.errors import BadInput
from amp_track.stores import store_checks
from amp_track.stores.addresses import StoreAddress

MAX_BATCH = ("max-batch", str(WORKLOADS / "small_mlp.py"), "--memory-budget", "24MiB")
Command = Callable[..., Done]


def run_sql(file: str, *statements: str) -> None:
    with closing(sqlite3.connect(file)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def foreign(file: str) -> None:
    os.unlink(file)
    run_sql(file, "CREATE TABLE notes (text)", "INSERT INTO notes VALUES ('milk')")


def garbage(file: str) -> None:
    Path(file).write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)


def overwritten_page(file: str) -> None:
    with open(file, "r+b") as opened:
        opened.seek(10 * 4096)
        opened.write(b"\xff" * 4096)


def truncated(file: str) -> None:
    os.truncate(file, os.path.getsize(file) // 2)


def text(file: str) -> None:
    Path(file).write_text("milk\nbread\n" * 100)


def other_version(file: str) -> None:
    run_sql(file, "UPDATE alembic_version SET version_num = 'of next year'")


def without_version(file: str) -> None:
    run_sql(file, "DELETE FROM alembic_version")


def half_migrated(file: str) -> None:
    run_sql(file, "CREATE TABLE _alembic_tmp_tags (key)")


def without_a_table(file: str) -> None:
    run_sql(file, f"DROP TABLE {'trial_heartbeats' if 'optuna' in file else 'datasets'}")


def swapped(file: str) -> None:
    os.replace("mlflow.db" if "optuna" in file else "optuna.db", file)


def foreign_with_our_names(file: str) -> None:
    """Make a database of another program, which happens to have tables of such names; some of them are empty."""
    os.unlink(file)
    first, second = ("studies", "trials") if "optuna" in file else ("experiments", "runs")
    run_sql(file, f"CREATE TABLE {first} (patient)", f"CREATE TABLE {second} (outcome)", "CREATE TABLE patients (name)")
    run_sql(file, f"INSERT INTO {first} VALUES ('a')", "INSERT INTO patients VALUES ('a')")


DAMAGES = {
    foreign_with_our_names: "some tables of ",
    foreign: "it has other tables (notes)",
    garbage: "not an SQLite database",
    overwritten_page: "which cannot be read (",
    truncated: "which cannot be read (database disk image is malformed)",
    text: "not an SQLite database",
    other_version: "version",
    without_version: "some tables of ",
    half_migrated: "some tables of ",
    without_a_table: "has no table ",
    swapped: "which is a database of ",
}


@pytest.mark.usefixtures("fresh_stores")
@pytest.mark.parametrize(("flag", "file"), [("--storage", "optuna.db"), ("--tracking-uri", "mlflow.db")])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_store_that_cannot_be_used_is_told_in_one_line_and_left_alone(
    damage: Callable[[str], None], flag: str, file: str, amp_track: Command, tmp_path: Path
) -> None:
    damage(file)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = amp_track(*MAX_BATCH)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"amp-track: {flag}: ")
    assert file in line
    assert DAMAGES[damage] in line
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_store_that_stays_locked_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_checks, "_SECONDS_LOCKED", 0.2)
    with closing(sqlite3.connect("locked.db")) as connection:
        connection.execute("CREATE TABLE studies (name)")
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BadInput, match=r"locked\.db, which another process has locked"):
            store_checks.check_storage(StoreAddress.parse("sqlite:///locked.db"))


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "new.db").touch()
    store_checks.check_storage(StoreAddress.parse("sqlite:///new.db"))
    store_checks.check_tracking(StoreAddress.parse("sqlite:///new.db"))
    assert (tmp_path / "new.db").read_bytes() == b""


@pytest.mark.parametrize("target", ["nowhere", "folder", "file", None])
@pytest.mark.parametrize(
    ("flag", "url", "lock"),
    [
        ("--storage", "sqlite:///optuna.db", "optuna.db.lock"),
        ("--storage", "optuna.log", "optuna.log.amp_track.lock"),
        ("--tracking-uri", "sqlite:///mlflow.db", "mlflow.db.lock"),
    ],
)
def test_a_link_or_a_folder_in_place_of_a_lock_is_told_in_one_line_and_left_alone(
    target: str | None, flag: str, url: str, lock: str, amp_track: Command
) -> None:
    Path("folder").mkdir()
    Path("file").write_text("precious")
    if target is None:
        Path(lock).mkdir()
    else:
        Path(lock).symlink_to(target)
    done = amp_track(*MAX_BATCH, flag, url)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"amp-track: {flag}: got {url}")
    assert lock in line
    assert sorted(os.listdir()) == sorted(["file", "folder", lock])
    assert Path("file").read_text() == "precious"


def test_a_folder_in_place_of_the_lock_of_a_journal_is_told_and_left_alone(amp_track: Command) -> None:
    """Not broken after a while, as the lock of a killed process is."""
    Path("optuna.log.lock").mkdir()
    done = amp_track(*MAX_BATCH, "--storage", "optuna.log")
    (line,) = done.stderr.splitlines()
    assert (done.returncode, os.listdir()) == (2, ["optuna.log.lock"])
    assert "optuna.log.lock" in line


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc, where root may write and no file can be made")
@pytest.mark.parametrize("arguments", [(), ("--storage", "optuna.log")])
def test_a_working_folder_where_no_file_can_be_made_is_told_in_one_line(
    arguments: tuple[str, ...], amp_track: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")
    done = amp_track(*MAX_BATCH, *arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "/proc" in line


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite:///\0", "cannot be opened"),
        ("sqlite:///" + "x" * 300, "cannot be opened"),
        ("sqlite:///" + "x/" * 3000 + "x.db", "cannot be opened|does not exist"),
        ("sqlite:///nowhere/x.db", "/nowhere does not exist"),
        ("sqlite:///file:x?mode=ro&uri=true", "expected sqlite:///PATH"),
        ("postgresql+psycopg://u:hunter2@127.0.0.1:9/x", "cannot be opened"),
    ],
    ids=["zero byte", "long name", "long path", "no folder", "URI of SQLite", "nobody listens"],
)
def test_odd_addresses_are_told_in_one_line(url: str, expected: str, tmp_path: Path) -> None:
    for check in (store_checks.check_storage, store_checks.check_tracking):
        with pytest.raises(BadInput, match=expected) as raised:
            check(StoreAddress.parse(url))
        assert "\n" not in str(raised.value)
        assert "hunter2" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--storage", "--tracking-uri", "AMP_TRACK_STORAGE", "MLFLOW_TRACKING_URI"])
@pytest.mark.parametrize("password", ["fi/r@SECOND", "first@S", "first@SECOND%40third", "a b@SECOND"])
def test_a_driver_shows_no_part_of_a_password(
    flag: str, password: str, amp_track: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy takes what follows the first @ for the host, which the driver names where it cannot find it."""
    address = f"postgresql+psycopg://me:{password}@nowhere.invalid/x"
    if not flag.startswith("--"):
        monkeypatch.setenv(flag, address)
    done = amp_track(*MAX_BATCH, *([flag, address] if flag.startswith("--") else []))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nowhere.invalid" in done.stderr
    assert not any(part in done.stderr for part in ("first", "SECOND", "third", "fi/r", "S@", "a b"))


@pytest.mark.parametrize("uri", ["mlflow-artifacts:/", "file:///tmp/mlruns", "./mlruns", "databricks", "uc://x"])
def test_a_store_whose_runs_cannot_be_searched_is_no_tracking_uri(uri: str) -> None:
    with pytest.raises(BadInput, match=r"such as sqlite:///mlflow\.db, or a server such as http://127") as raised:
        store_checks.check_tracking(StoreAddress.parse(uri))
    assert "\n" not in str(raised.value)


@contextmanager
def answering(answer: Callable[[str | None], tuple[int, bytes]], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve what `answer` returns for the Authorization header of a request: status and content."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(self.headers["Authorization"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{'https' if tls is not None else 'http'}://127.0.0.1:{server.server_port}"
        server.shutdown()


PAGE = b"<!doctype html><title>Welcome</title>"


@pytest.mark.parametrize(("status", "expected"), [(500, "no MLflow server answers"), (200, "is not an MLflow server")])
def test_another_server_is_no_tracking_server(status: int, expected: str) -> None:
    with answering(lambda _: (status, PAGE)) as url, pytest.raises(BadInput, match=expected):
        store_checks.check_tracking(StoreAddress.parse(url))


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_rejects_the_request_is_there(status: int) -> None:
    with answering(lambda _: (status, PAGE)) as url:
        store_checks.check_tracking(StoreAddress.parse(url))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MLFLOW_TRACKING_TOKEN": "abc"}, "Bearer abc"),
        ({"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "señor€"}, "Basic bWU6c2XDsW9y4oKs"),
    ],
    ids=["token", "password"],
)
def test_a_server_behind_a_login_gets_the_one_of_mlflows_variables(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(lambda login: (200, b"OK" if login == expected else PAGE)) as url:
        with pytest.raises(BadInput, match="is not an MLflow server"):
            store_checks.check_tracking(StoreAddress.parse(url))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        store_checks.check_tracking(StoreAddress.parse(url))


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_a_server_with_its_own_certificate_is_checked_as_mlflows_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out cert.pem "
        "-days 1 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(shlex.split(make), check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile="cert.pem")
    tls.load_cert_chain("cert.pem", "key.pem")
    with answering(lambda _: (200, b"OK"), tls) as url:
        address = StoreAddress.parse(url)
        with pytest.raises(BadInput, match=r"no MLflow server answers there \(SSLError\)"):
            store_checks.check_tracking(address)
        for name, value in (("INSECURE_TLS", "true"), ("SERVER_CERT_PATH", "cert.pem")):
            with monkeypatch.context() as patch:
                patch.setenv(f"MLFLOW_TRACKING_{name}", value)
                store_checks.check_tracking(address)
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", "nowhere.pem")
        with pytest.raises(BadInput, match=r"answers there \(.*nowhere\.pem\)"):
            store_checks.check_tracking(address)
    tls.verify_mode = ssl.CERT_REQUIRED  # of the client too
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", "cert.pem")
    Path("both.pem").write_text(Path("cert.pem").read_text() + Path("key.pem").read_text())
    with answering(lambda _: (200, b"OK"), tls) as url:
        with pytest.raises(BadInput, match="no MLflow server answers there"):
            store_checks.check_tracking(StoreAddress.parse(url))
        monkeypatch.setenv("MLFLOW_TRACKING_CLIENT_CERT_PATH", "both.pem")
        store_checks.check_tracking(StoreAddress.parse(url))
