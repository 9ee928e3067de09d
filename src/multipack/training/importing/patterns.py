"""Regular expressions of an untrusted file, matched in another process, which ends after some seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from multipack.training.importing.outcome import NotHonored

MOST_SECONDS = 5.0
"""Time for all patterns of a key. Repeats in repeats, such as `((a+)+)!`, would run for years."""
_MATCH = """
import json, re, sys
names = json.loads(sys.argv[1])
for pattern in json.load(sys.stdin):
    try:
        print(json.dumps([bool(re.match(pattern, name)) for name in names]), flush=True)
    except Exception as error:
        sys.exit(f"{pattern!r:.60} is no regular expression: {error}")
"""


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[list[bool]]:
    """(patterns, names) whether a pattern matches the beginning of a name.

    Raises:
        NotHonored: one is no regular expression, or takes too long.
    """
    command = [sys.executable, "-I", "-S", "-c", _MATCH, json.dumps(list(names))]
    try:
        ended = subprocess.run(
            command,
            input=json.dumps([*map(str, patterns)]),
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise NotHonored(f"its regular expressions take more than {MOST_SECONDS:g} s to match") from None
    if ended.returncode:
        raise NotHonored(ended.stderr.strip().rpartition("\n")[2])
    return [json.loads(line) for line in ended.stdout.splitlines()]
