"""Fenced blocks of a response: where models put code and JSON."""

from __future__ import annotations

import re
from collections.abc import Collection

BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)


def last_block(text: str, languages: Collection[str] = ()) -> str | None:
    """The text of the last fenced block in one of these languages, else of the last one without a language; with no
    languages given, of the last one at all. None if there is none."""
    blocks = [(match[2].lower(), match[3]) for match in BLOCK.finditer(text)]
    if not languages:
        return blocks[-1][1] if blocks else None
    for wanted in (languages, ("",)):
        found = [body for language, body in blocks if language in wanted]
        if found:
            return found[-1]
    return None
