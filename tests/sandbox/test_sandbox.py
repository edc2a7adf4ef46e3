"""The sandbox as its callers see it."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from sandbox_cases import CONNECT, Listener, needs_bwrap

from cadenza.sandbox import Sandbox, SandboxLimits

pytestmark = needs_bwrap
LIMITS = SandboxLimits(wall_seconds=100, cpu_seconds=50)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(runner: asyncio.Runner) -> Iterator[Sandbox]:
    sandbox = Sandbox(LIMITS, concurrency=2)
    runner.run(sandbox.open())
    yield sandbox
    runner.run(sandbox.close())


@pytest.fixture
def run(runner: asyncio.Runner) -> Callable[[Awaitable[object]], object]:
    async def finished(work: Awaitable[object]) -> object:
        return await work

    return lambda work: runner.run(finished(work))


# -- programs ----------------------------------------------------------------------------------------------------------


def test_a_program_gets_its_input_and_files_and_returns_its_output_and_exit_code(run, sandbox: Sandbox) -> None:
    code = "import sys; print(input() + open('lib/x.txt').read()); print('no', file=sys.stderr); sys.exit(3)"
    result = run(sandbox.run(["python3", "-c", code], stdin=b"2 + ", files={"lib/x.txt": "3"}))
    assert (result.outcome, result.exit_code, result.signal) == ("exited", 3, None)
    assert (result.stdout, result.stderr) == (b"2 + 3\n", b"no\n")
    assert not result.ok
    assert run(sandbox.run(["true"])).ok


def test_input_and_files_may_be_large_and_are_bytes(run, sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 2000
    code = "import sys; a, b = sys.stdin.buffer.read(), open('data', 'rb').read(); sys.stdout.buffer.write(a + b)"
    assert run(sandbox.run(["python3", "-c", code], stdin=data, files={"data": data})).stdout == data + data


def test_arguments_and_variables_arrive_as_they_are(run, sandbox: Sandbox) -> None:
    strange = ["", "a b", "$HOME `id` \\ \"'", "line\nline", "ünï", "*"]
    code = "import os, sys; print(sys.argv[1:] + [os.environ['NAME']])"
    result = run(sandbox.run(["python3", "-c", code, *strange], environment={"NAME": "it's $x"}))
    assert result.stdout.decode().strip() == repr([*strange, "it's $x"])


def test_a_program_that_is_not_there_is_the_callers_to_judge(run, sandbox: Sandbox) -> None:
    result = run(sandbox.run(["no-such-program"]))
    assert (result.outcome, result.exit_code) == ("exited", 127)
    assert b"not found" in result.stderr


def test_a_signal_is_told_from_an_exit_code(run, sandbox: Sandbox) -> None:
    result = run(sandbox.run(["python3", "-c", "import os; os.kill(os.getpid(), 11)"]))
    assert (result.outcome, result.exit_code, result.signal) == ("killed", None, 11)


def test_a_program_never_sees_the_files_or_processes_of_another(run, sandbox: Sandbox) -> None:
    leave = "import os\nfor d in '/tmp', '/dev/shm': open(d + '/left', 'w').close()\nif os.fork() == 0: os.pause()"
    look = (
        "import os; print([*os.listdir('/tmp'), *os.listdir('/dev/shm')],"
        "len([*filter(str.isdigit, os.listdir('/proc'))]))"
    )

    async def both() -> list[bytes]:
        results = [await sandbox.run(["python3", "-c", code]) for code in (leave, look)]
        together = await asyncio.gather(*(sandbox.run(["python3", "-c", look]) for _ in range(4)))
        return [result.stdout for result in (*results[1:], *together)]

    assert run(both()) == [b"[] 2\n"] * 5


def test_programs_run_at_the_same_time(run, sandbox: Sandbox) -> None:
    async def meet() -> None:
        async with Listener() as listener:
            code = CONNECT.format(port=listener.port, word="here") + "print(s.recv(10))"
            programs = [
                asyncio.create_task(sandbox.run(["python3", "-c", code], forward=listener.port)) for _ in range(2)
            ]
            writers = [(await listener.connections.get())[1] for _ in programs]
            for writer in writers:  # neither was let go before both had come
                writer.write(b"go")
            assert [(await program).stdout for program in programs] == [b"b'go'\n"] * 2

    run(meet())


def test_output_beyond_its_limit_counts_also_when_the_program_ends_at_once(run, sandbox: Sandbox) -> None:
    size = LIMITS.output_bytes + 1
    result = run(sandbox.run(["python3", "-c", f"import os; os.write(2, b'x'); os.write(1, b'x' * {size})"]))
    assert (result.outcome, result.exit_code) == ("output", None)
    assert (len(result.stdout), result.stdout_truncated) == (size - 1, True)
    assert (result.stderr, result.stderr_truncated) == (b"x", False)


def test_memory_that_processes_share_counts_once(run, sandbox: Sandbox) -> None:
    code = (
        "import os, time\nheld = os.urandom(200 << 20)\nchildren = []\n"
        "for _ in range(4):\n    children.append(os.fork())\n    if not children[-1]: time.sleep(0.5); os._exit(0)\n"
        "for child in children: os.waitpid(child, 0)"
    )
    assert run(sandbox.run(["python3", "-c", code])).ok


def test_many_jails_fit_where_few_files_may_be_open(runner: asyncio.Runner) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def programs() -> list[bool]:
        async with Sandbox(LIMITS, concurrency=16) as sandbox:
            return [result.ok for result in await asyncio.gather(*(sandbox.run(["true"]) for _ in range(16)))]

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
    try:
        assert all(runner.run(programs()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))


def test_limits_are_those_that_a_program_finds(runner: asyncio.Runner) -> None:
    limits = SandboxLimits(cpu_seconds=7, memory_mb=300, processes=5, file_mb=3, open_files=40, tmp_mb=9)
    code = (
        "import os, resource as r\n"
        "kinds = r.RLIMIT_CPU, r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE\n"
        "print([r.getrlimit(kind)[1] for kind in kinds],"
        "[os.statvfs(p).f_blocks * os.statvfs(p).f_frsize for p in ('/tmp', '/dev/shm')])"
    )

    async def found() -> bytes:
        async with Sandbox(limits, concurrency=1) as sandbox:
            return (await sandbox.run(["python3", "-c", code])).stdout

    megabyte = 1 << 20
    expected = f"{[8, 300 * megabyte, 6, 3 * megabyte, 40]} {[9 * megabyte] * 2}"
    assert runner.run(found()).decode().strip() == expected


def test_visible_directories_can_be_read_and_not_written(runner: asyncio.Runner, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("seen")
    tmp_path.chmod(0o777)

    async def found() -> tuple[bytes, bytes]:
        async with Sandbox(LIMITS, concurrency=1, visible=[tmp_path]) as sandbox:
            read = await sandbox.run(["cat", str(tmp_path / "note")])
            write = await sandbox.run(["touch", str(tmp_path / "new")])
        return read.stdout, write.stderr

    read, write = runner.run(found())
    assert read == b"seen"
    assert b"Read-only" in write
    assert not (tmp_path / "new").exists()


# -- one address of the host -------------------------------------------------------------------------------------------


def test_a_forwarded_port_is_all_that_a_program_reaches(run, sandbox: Sandbox) -> None:
    async def reach() -> None:
        async with Listener() as listener, Listener() as other:
            code = (
                "import socket\n"
                f"for address in ('127.0.0.1', {other.port}), ('127.0.0.2', {listener.port}), ('10.0.0.1', 80):\n"
                "    assert socket.socket().connect_ex(address) != 0\n"
                + CONNECT.format(port=listener.port, word="question")
                + "s.shutdown(1); print(s.recv(100).decode())"
            )
            program = asyncio.create_task(sandbox.run(["python3", "-c", code], forward=listener.port))
            reader, writer = await listener.connections.get()
            assert await reader.read() == b"question"
            writer.write(b"answer")
            assert (await program).stdout == b"answer\n"
            assert listener.connections.empty()
            assert other.connections.empty()

    run(reach())


def test_a_forwarded_unix_socket_is_at_a_known_place(run, sandbox: Sandbox) -> None:
    async def reach() -> None:
        async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.read()).upper())
            writer.close()

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "socket")
            server = await asyncio.start_unix_server(shout, path)
            for open_to_all in (path, path.parent):  # the sandbox of root is another user
                open_to_all.chmod(0o777)
            code = (
                "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/tmp/forward.sock');"
                "s.sendall(b'hey'); s.shutdown(1); print(s.recv(9))"
            )
            async with server:
                result = await sandbox.run(["python3", "-c", code], forward=path)
        assert result.stdout == b"b'HEY'\n"

    run(reach())
