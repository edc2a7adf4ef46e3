"""What a user of `backend=ray` sees: one JSON object, errors that say what to do, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pipeline_cases import PROGRAM, TINY, Commands, config_file

pytest.importorskip("ray")

from ray_cases import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    """Each command has a Ray of its own, which ends with it."""
    with Commands() as running:
        yield running


NOISY = """
import sys
from cadenza.algorithms import ppo_clip
def loss(*tensors):
    print("a worker prints", flush=True)
    print("a worker complains", file=sys.stderr, flush=True)
    return ppo_clip(*tensors)
"""


def test_json_is_one_object_whatever_the_workers_print_and_ray_is_gone_afterwards(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    path = config_file(tmp_path, actor={**TINY["actor"], "loss": "noisy:loss"})
    program = (
        "import sys; from cadenza.cli import main; code = main(sys.argv[1:]);"
        "import ray; print(ray.is_initialized(), file=sys.stderr); sys.exit(code)"
    )
    done = commands.run(tmp_path, "train", path, "backend=ray", "--json", program=program)
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == TINY["steps"]
    assert "a worker prints" in done.err
    assert "a worker complains" in done.err
    assert done.err.splitlines()[-1] == "False"


def test_an_embedded_run_imports_no_ray(commands: Commands, tmp_path: Path) -> None:
    program = (
        "import sys; from cadenza.cli import main; main(sys.argv[1:]); print('ray' in sys.modules, file=sys.stderr)"
    )
    done = commands.run(tmp_path, "train", config_file(tmp_path), "--json", program=program)
    assert json.loads(done.out)["steps"] == TINY["steps"]
    assert done.err.splitlines()[-1] == "False"


def test_without_ray_the_install_command_is_named(commands: Commands, tmp_path: Path) -> None:
    program = f"import sys; sys.modules['ray'] = None; {PROGRAM}"
    done = commands.run(tmp_path, "train", config_file(tmp_path), "backend=ray", program=program)
    assert done.code == 1
    assert "cadenza: the backend 'ray' needs Ray: pip install 'cadenza[ray]'" in done.err


@contextmanager
def deaf() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def stranger() -> Iterator[str]:
    """The address of a server of something else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"220 mail.example ESMTP\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@contextmanager
def guarded() -> Iterator[str]:
    """The address of a head that wants a token: what Ray 2.60 answers to a call without one."""
    settings = b"\0\0\0\4\0\0\0\0\0"
    fields = b"\x88@\x0ccontent-type\x10application/grpc\0\x0bgrpc-status\x0216\0\x0cgrpc-message\x10InvalidAuthToken"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(settings + bytes([0, 0, len(fields), 1, 5, 0, 0, 0, 1]) + fields)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@contextmanager
def named(address: str) -> Iterator[str]:
    yield address


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (named("127.0.0.1:1"), "the Ray head at 127.0.0.1:1 does not answer"),
        (deaf(), "does not answer: timed out"),
        (stranger(), "is not a Ray head: is that the port of another program?"),
        (guarded(), "wants a token, and this process has none or another one: set RAY_AUTH_MODE=token"),
        (named("nowhere"), "there is no Ray cluster at nowhere: Invalid address"),
        (named("ray://127.0.0.1:1"), "is an address of Ray Client: run the controller on a node of the cluster"),
    ],
    ids=["closed", "deaf", "stranger", "guarded", "no address", "client"],
)
def test_an_address_without_a_head_is_an_error_of_one_line(
    there: Iterator[str], message: str, commands: Commands, tmp_path: Path
) -> None:
    with there as address:  # type: ignore[attr-defined]
        environment = {"RAY_ADDRESS": address, "HOME": str(tmp_path)}  # a token at home would be tried
        done = commands.run(tmp_path, "train", config_file(tmp_path), "backend=ray", "--json", **environment)
    assert done.code == 1
    assert message in json.loads(done.out)["error"]
    (said,) = (line for line in done.err.splitlines() if line.startswith("cadenza: "))
    assert message in said
    assert "Traceback" not in done.err


OTHER = "import ray, sys; ray.init('local', num_cpus=1, include_dashboard=False); print('up', flush=True); input()"


def test_a_run_without_an_address_leaves_another_ray_of_the_machine_alone(commands: Commands, tmp_path: Path) -> None:
    environment = {"RAY_raylet_start_wait_time_s": "120", **os.environ}
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        done = commands.run(tmp_path, "train", config_file(tmp_path), "steps=1", "backend=ray", "--json")
        other.communicate(timeout=100)  # which ends it in good order
    finally:
        other.kill()
        other.wait()
    assert done.code == 0, done.err
    assert "Started a local Ray instance" in done.err
    assert "existing Ray cluster" not in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_a_checkpoint_and_no_process(number: signal.Signals, commands: Commands, tmp_path: Path) -> None:
    command = commands.start(tmp_path, "train", config_file(tmp_path), "steps=100000", "backend=ray", "--json")
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    try:
        until(lambda: not processes_of(command.pid) or (metrics.exists() and metrics.read_bytes().count(b"\n") > 2))
        running = len(processes_of(command.pid))
        with suppress(ProcessLookupError):
            os.killpg(command.pid, number) if number is signal.SIGINT else command.signal(number)
        done = command.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait()  # so that the next command gets its own answer
        raise
    assert running > 3, done.err  # Ray's processes and the workers are among them
    assert done.code == 130, done.err
    assert json.loads(done.out)["ended"] == "stopped"
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "last" / "training").is_dir()
    assert not processes_of(command.pid)


def processes_of(session: int) -> list[str]:
    """The processes of a session that are left."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        state, _, _, owner, *_ = text.rpartition(")")[2].split()
        if int(owner) == session and state != "Z":
            found.append(text)
    return found
