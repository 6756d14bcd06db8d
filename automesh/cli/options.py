"""What several commands share: how an option is read, and how a result is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from automesh.errors import UsageError

_T = TypeVar("_T")


def read_option(option: str, read: Callable[[str], _T], text: str) -> _T:
    """What an option says.

    Raises:
      UsageError: as `read`, with the name of the option in front.
    """
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hint) from None


def print_result(result: Any, *, as_json: bool, top: int, verbose: bool) -> None:
    """Prints a result on stdout, as a table or as JSON.

    Args:
      result: `Result` or `Results` of `automesh.answers`.
    """
    text = (
        json.dumps(result.to_json(), indent=1)
        if as_json
        else result.table(top=top, verbose=verbose)
    )
    sys.stdout.write(text + "\n")
