"""A cluster for an example: SLURM of one node, and servers of its stores, that nobody else reaches.

    python docs/clusters.py work-slurm      within such a network alone: what `run_and_record` starts there

The launchers refuse stores that only one machine reaches. A server that others reach would ask nobody for a password
while an example runs. So all of it runs in a network of its own, without a way out, on an address that is no
loopback; the machine's own network, host name and /etc stay as they are. What has started there ends with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import examples

from benchmarks.servers import running_server as running_mlflow
from tests import postgresql, slurm_cluster

_NODE, _STORES, _ADDRESS = "node1", "stores", "10.99.0.1"
_HOSTS = f"127.0.0.1 localhost\n{_ADDRESS} {_NODE} {_STORES}\n"
_NAMESPACES = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_SET_UP = f"""
set -e
ip link set lo up
ip address add {_ADDRESS}/32 dev lo
hostname {_NODE}
mount --bind "$1" /etc/hosts
shift
"$@"
exit 0  # not the command in place of this shell, which reaps the daemons: it is the first process there
"""
_PROGRAMS = {"unshare": "util-linux", "ip": "iproute2", "hostname": "hostname", "mount": "mount"}
"""What sets the network up, and the Debian package that has it."""
_END_SECONDS = 60


def missing() -> str:
    """Return what an example on a cluster needs and this machine lacks, in one line; nothing where it can run."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"needs {program}: apt-get install {package}"
    tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"needs a network of its own, which root may make on Linux: {tried.stderr.strip()}"
    if importlib.util.find_spec("submitit") is None:
        return "needs submitit: pip install submitit"
    return postgresql.missing() or slurm_cluster.missing()


def run_and_record(name: str) -> None:
    """Run an example on its cluster, in a network of its own, and write its record."""
    with tempfile.NamedTemporaryFile("w", prefix="hosts-") as hosts:
        hosts.write(_HOSTS)
        hosts.flush()
        os.chmod(hosts.name, 0o644)  # PostgreSQL, which is another user there, looks its own name up
        command = [*_NAMESPACES, "sh", "-c", _SET_UP, "sh", hosts.name, sys.executable, __file__, name]
        # The nodes of a cluster have amp_track from here, too.
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(examples.ROOT)})
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # Ctrl-C has come to all of them: servers and folders are taken down there.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            raise
        finally:
            process.kill()  # and with it everything that runs there still
    if code:
        raise SystemExit(code)  # it has said why


@contextlib.contextmanager
def _stores() -> Iterator[None]:
    """Start PostgreSQL and MLflow's server where the examples look for them; they end with the block."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(postgresql.running_server(host=_STORES, port=5432, user="optuna"))
        server.new_database("optuna")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlflow-")))
        database = server.new_database("mlflow")
        stack.enter_context(running_mlflow(folder, database=database, host=_STORES, port=5000))
        yield


def _main() -> None:
    (name,) = sys.argv[1:]
    assert examples.EXAMPLES[name].on_slurm, f"{name} needs no cluster"
    try:
        with _stores(), slurm_cluster.running_cluster():
            examples.run_and_record(name)
    except slurm_cluster.NodeIsDown as error:
        raise SystemExit(f"example {name}: {error}") from None


if __name__ == "__main__":
    _main()
