"""A process that checks mathematical answers with math-verify, one after the other, until its pipe is closed.

math-verify is told to set no time-out: its own are signals, which work in the main thread of a process only. Whoever
started this process kills it when it is late; if that one is gone, the alarm does.

    python -m cadenza.rewards.math_verifier FILE_DESCRIPTOR SECONDS
    request  {"answers": ["1/2"], "response": "... \\\\boxed{0.5}", "precision": 6}
    reply    {"right": true, "found": "0.5"}, or {"unreadable": "what is wrong with the answers"}
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Sequence
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

from cadenza.rewards.math_answer import as_words, final_answer, plain_words, searchable
from cadenza.rewards.math_latex import as_latex

MEMORY_BYTES = 4 << 30
"""Address space. A number with a billion digits ends this process, and not the machine."""
GRACE_SECONDS = 5.0
"""After the time that the owner waits, and then kills."""


MOST_LETTERS = 1000
"""Of an answer. A longer one is none, and is not read: brackets by the thousand would keep the parser busy for ever."""
SEARCHED_LETTERS = 4000
"""At the end of a response, where an answer in prose is searched."""
WORKED = re.compile(r"\\boxed|^####", re.MULTILINE)


def check(answers: Sequence[str], response: str, precision: int) -> dict[str, Any]:
    """Whether the response has one of the answers. An answer may be a worked solution that ends with a box or ####."""
    found = final_answer(response)
    answers = [(final_answer(answer) or answer) if WORKED.search(answer) else answer for answer in answers]
    readable = [answer for answer in answers if as_words(answer) is not None or _parsed(answer)]
    if not readable:
        return {"unreadable": f"{', '.join(map(repr, answers))} cannot be read as mathematics"}
    return {"right": any(_is_same(answer, found, response, precision) for answer in readable), "found": found}


def _is_same(answer: str, found: str | None, response: str, precision: int) -> bool:
    said = plain_words(response if found is None else found)
    if said and said == plain_words(answer):
        return True
    words = as_words(answer)
    if words is not None:
        return re.search(rf"(?:^|\b(?:is|are) ){re.escape(words)}$", plain_words(response)) is not None
    from math_verify import verify

    candidates = _parsed(found) if found is not None else _searched(response)
    golds = [*_parsed(answer), *(_parsed(answer.rstrip(" \\%")) if answer.endswith("%") else [])]
    options = {"float_rounding": precision, "allow_set_relation_comp": True, "timeout_seconds": None}
    for gold, candidate in product(golds, candidates):
        try:
            if verify(gold, candidate, raise_on_error=True, **options):
                return True
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - sympy cannot compare these two, so they are not the same
            continue
    return False


def _parsed(answer: str) -> list[Any]:
    """What the text of an answer means, as sympy's expressions."""
    from math_verify import LatexExtractionConfig, parse

    if len(answer) > MOST_LETTERS:
        return []
    latex = as_latex(answer)
    boxed = rf"\boxed{{{latex}}}"
    found = parse(boxed, [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None) if latex else []
    return [expression for expression in found if not isinstance(expression, str)]


def _searched(response: str) -> list[Any]:
    """The last expression in prose."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    found = parse(searchable(response[-SEARCHED_LETTERS:]), configs, parsing_timeout=None)
    return [expression for expression in found if not isinstance(expression, str)]


def main() -> None:
    connection, seconds = Connection(int(sys.argv[1])), float(sys.argv[2])
    logging.disable()  # it warns that it has no time-outs
    import math_verify  # noqa: F401 - before the first request, whose time is short

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send_bytes(b"ready")
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)  # without a handler, the alarm kills
        reply = check(**request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main()
