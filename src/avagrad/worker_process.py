"""A worker process. It ends with the process that started it, and is killed together with its subprocesses."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["WorkerProcess", "stop_all"]

# The first code of a worker. Its guard, an orphaned process, waits until the pipe from the parent is closed, on purpose
# or by its death, and then kills the worker and its subprocesses: even a worker whose code blocks all threads. The
# work is received before the imports, which take seconds.
_BEGIN = """\
import json, os, signal, sys
from multiprocessing.connection import Connection
alive, pipe = map(int, sys.argv[1:])
if os.fork() == 0:
    if os.fork() == 0:
        os.close(pipe)
        os.read(alive, 1)
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
os.wait()
os.close(alive)
os.set_inheritable(pipe, False)
connection = Connection(pipe)
try:
    path, packed = connection.recv_bytes(), connection.recv_bytes()
except EOFError:
    sys.exit(1)
sys.path[:] = json.loads(path)
from avagrad.worker_process import _main
_main(packed, connection)
"""


class WorkerProcess:
    """Calls ``function(connection, *arguments)`` in a new process, which leads its own session.

    ``connection`` is the other end of :attr:`connection`; function and arguments are pickled. On SIGTERM the process
    raises SystemExit.

    >>> process = WorkerProcess(Connection.send, "hello")
    >>> process.connection.recv()
    'hello'
    >>> process.close()
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        """Start it in this folder, with these environment variables in addition to ours."""
        if not hasattr(os, "fork"):
            raise OSError("worker processes need Linux or macOS.")
        packed = pickle.dumps((function, arguments))
        path = json.dumps([str(entry) for entry in sys.path])
        alive, self._alive = os.pipe()
        self.connection, theirs = Pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, str(alive), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[alive, theirs.fileno()],
                start_new_session=True,
                cwd=folder,
                env={**os.environ, **(environment or {})},
            )
        finally:
            os.close(alive)
            theirs.close()
        with contextlib.suppress(BrokenPipeError):  # the caller will notice that it has died
            self.connection.send_bytes(path.encode())
            self.connection.send_bytes(packed)

    def close(self) -> None:
        """Kill it and all its subprocesses."""
        if self.connection.closed:
            return
        # Before wait(): until then the pid cannot be reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._alive)
        self.connection.close()


def stop_all(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Ask all processes to stop, give them some seconds to save, and kill those that take longer.

    >>> stop_all([], 1.0)
    """
    try:
        for each in processes:
            each.process.terminate()
        until = time.monotonic() + seconds
        for each in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, until - time.monotonic()))
    finally:  # a second interruption does not wait
        for each in processes:
            each.close()


def _main(packed: bytes, connection: Connection) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    function, arguments = pickle.loads(packed)
    function(connection, *arguments)
