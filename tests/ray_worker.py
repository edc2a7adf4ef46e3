"""Worker processes of Ray for tests: forked off one process that has imported torch, which takes seconds each time.

    raylet ---> launch (this program, in place of Ray's setup_worker.py) ---> serve, which forks ---> Ray's worker
                   ^ lives as long as the worker, which has the other end of its connection

A worker that is to have an environment of its own (`runtime_env`), or that finds no server, starts as Ray starts it.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "CADENZA_TEST_WORKERS"
"""The variable that tells `launch` where `serve` listens."""
SOCKET = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
MAX_MESSAGE = 1 << 17


@contextmanager
def worker_server(directory: Path, path: list[str]) -> Iterator[dict[str, str]]:
    """The process that forks, with modules from `path`; the variables that the raylets need."""
    variables = {ADDRESS: str(directory / "workers"), "PYTHONPATH": os.pathsep.join(path)}
    server = subprocess.Popen(
        [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **variables},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield variables
    finally:
        server.communicate()


def serve() -> None:
    """Fork off a worker for each connection, until stdin ends. Ray itself is imported in the worker: it reads the
    environment of its process then."""
    from transformers import LlamaForCausalLM  # noqa: F401

    import cadenza.run.workers
    import cadenza.testing  # noqa: F401

    assert "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    with socket.socket(*SOCKET) as server:
        server.bind(os.environ[ADDRESS])
        server.listen(64)
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            connection, _ = server.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 2)
            if message and not os.fork():
                server.close()
                _become_worker(json.loads(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.close()


def _become_worker(order: dict[str, Any], descriptors: list[int]) -> None:
    """Run Ray's worker program in this process, and end."""
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["arguments"]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - nothing above this is the worker's
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def launch(arguments: list[str]) -> None:
    """Have a worker forked, and wait for its end."""
    setup = argparse.ArgumentParser(allow_abbrev=False)  # as in Ray's program: what it does not know is the worker's
    setup.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
    setup.add_argument("--language")
    known, others = setup.parse_known_args(arguments)
    context = known.serialized_runtime_env_context
    if context.get("env_vars") or context.get("py_executable") not in (None, sys.executable):
        _launch_as_ray_does(arguments)
    with socket.socket(*SOCKET) as connection:
        try:
            connection.connect(os.environ[ADDRESS])
        except (FileNotFoundError, ConnectionError):
            _launch_as_ray_does(arguments)
        order = {"directory": os.getcwd(), "environment": dict(os.environ), "arguments": others}
        socket.send_fds(connection, [json.dumps(order).encode()], [1, 2])
        connection.recv(1)


def _launch_as_ray_does(arguments: list[str]) -> NoReturn:
    import ray

    program = Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"
    os.execv(sys.executable, [sys.executable, str(program), *arguments])


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else launch(sys.argv[1:])
