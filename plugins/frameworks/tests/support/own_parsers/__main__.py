"""Reads exported texts with a framework's own code: JSON lines in, JSON lines out.

python -m plugins.frameworks.tests.support.own_parsers maxtext
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main(name: str) -> None:
    # What a framework prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    read = importlib.import_module(f"plugins.frameworks.tests.support.own_parsers.{name}").read
    for line in sys.stdin:
        try:
            answer = read(**json.loads(line))
        except (Exception, SystemExit) as error:
            # MaxText ends the process, with the reason as the context.
            reason = error.__context__ if isinstance(error, SystemExit) else error
            answer = {"refused": f"{type(reason).__name__}: {reason}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
