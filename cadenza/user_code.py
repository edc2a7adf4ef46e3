"""Errors of code that a config names as 'module:name': one message with the key, the name, the error and its place."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cadenza.errors import InfrastructureError, UserCodeError


@contextmanager
def named_user_code(key: str, name: object, *, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns an exception raised within into a `UserCodeError` that names `key`, which a config sets to `name`.

    Exceptions pass as they are where `name` is no 'module:name': the code is then built in, or a function of the
    program that runs, which sees its own traceback. Infrastructure errors and those in `passes` do so always.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        is_named = isinstance(name, str) and ":" in name
        if not is_named or isinstance(error, (UserCodeError, InfrastructureError, *passes)):
            raise
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UserCodeError(f"{key}: '{name}' failed: {text}{place_of(error, str(name))}") from error


def place_of(error: BaseException, name: str) -> str:
    """Where in the file of 'module:name' an exception was raised, as ' (mine.py:12, in f)'; empty if it was not."""
    module = "/" + name.partition(":")[0].replace(".", "/")  # by its path: one that raises on import is no module yet
    files = (f"{module}.py", f"{module}/__init__.py")
    frames = traceback.extract_tb(error.__traceback__)
    own = next((frame for frame in reversed(frames) if Path(frame.filename).as_posix().endswith(files)), None)
    if own is None:
        return ""
    path = Path(own.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" ({shown}:{own.lineno}, in {own.name})"
