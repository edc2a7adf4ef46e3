"""How a command ends: its exit code, and what is said of an error.

Exit codes: 0 done; 1 the run failed, or a check found something; 2 the command was wrong; 130 interrupted. With --json
an error is an object too, {"error": "..."}. An error that needs a look at the code is raised, with its traceback.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from cyclopts import CycloptsError, UnknownOptionError


def exit_code(command: Callable[[], object], arguments: Sequence[str]) -> int:
    """Run the command that these arguments say; what the process ends with."""
    as_json = "--json" in arguments
    try:
        code = command()
    except CycloptsError as error:
        chain = [str(name) for name in error.command_chain or ()]
        hint = f"Try: {' '.join(['cadenza', *chain])} --help"
        if isinstance(error, UnknownOptionError) and chain in (["train"], ["resume"], ["plan"]):
            hint += ". Settings of a run are key=value, without dashes: steps=3"
        return _print_error(str(error), 2, as_json, hint=hint)
    except KeyboardInterrupt:
        return _print_error("interrupted", 130, as_json)
    except BrokenPipeError:  # the reader of the output, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
            [cause] = cause.exceptions
        if type(cause).__name__ == "InvalidArgument":
            return _print_error(str(cause), 2, as_json, hint=f"Try: cadenza {arguments[0]} --help")
        if isinstance(cause, Exception) and _is_expected(cause):
            return _print_error(_error_text(cause), 1, as_json)
        if as_json:
            print(json.dumps({"error": repr(cause)}))
        raise
    return code if isinstance(code, int) else 0


def _is_expected(error: Exception) -> bool:
    """Whether the message alone says what happened: an error of the scheduler, of a process that is gone, of code that
    a config names, of a file, of a missing extra."""
    from cadenza.datasets import DataError
    from cadenza.errors import InfrastructureError, UserCodeError
    from cadenza.rollout.failures import RolloutError

    named = ("ConfigError", "ModelStoreError", "NonFiniteLoss", "TemplateError", "TrackerError", "VersionMismatch")
    expected = (RolloutError, InfrastructureError, UserCodeError, DataError, OSError, ImportError)
    return isinstance(error, expected) or type(error).__name__ in named


def _error_text(error: Exception) -> str:
    """Of something that broke, with the notes that say where it was."""
    from cadenza.errors import InfrastructureError

    notes = getattr(error, "__notes__", ()) if isinstance(error, InfrastructureError) else ()
    return "; ".join([str(error), *notes])


def _print_error(message: str, code: int, as_json: bool, *, hint: str = "") -> int:
    """Say an error on stderr, and with --json on stdout too; returns the exit code."""
    if as_json:
        print(json.dumps({"error": message}))
    sys.stdout.flush()
    print(f"cadenza: {message}", file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    return code
