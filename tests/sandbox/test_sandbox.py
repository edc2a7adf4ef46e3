"""The sandbox as its callers see it."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from cadenza.sandbox import Sandbox, SandboxLimits

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not here: apt-get install bubblewrap"
)


def test_a_program_gets_its_input_and_files_and_returns_its_output_and_exit_code() -> None:
    async def program() -> None:
        async with Sandbox(SandboxLimits()) as sandbox:
            code = "import sys; print(input() + open('lib/x.txt').read()); print('no', file=sys.stderr); sys.exit(3)"
            result = await sandbox.run(["python3", "-c", code], stdin=b"2 + ", files={"lib/x.txt": "3"})
        assert (result.outcome, result.exit_code) == ("exited", 3)
        assert (result.stdout, result.stderr) == (b"2 + 3\n", b"no\n")

    asyncio.run(program())
