"""A notebook's code cells, and files that are none."""

from __future__ import annotations

import json

import pytest

from automesh.errors import UsageError
from automesh.program.script.notebook import code_of


def test_code_cells_in_their_order() -> None:
    cells = [
        {"cell_type": "code", "source": ["a = 1\n", "b = 2"]},
        {"cell_type": "markdown", "source": "# words"},
        {"cell_type": "code", "source": "c = 3"},
    ]
    assert code_of(json.dumps({"cells": cells}).encode(), "x.ipynb") == ["a = 1\nb = 2", "c = 3"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b'{"cells": 3}', b'{"cells": [{}]}', b"\xff", b"[" * 10**5,
     b'{"cells": [{"cell_type": "code", "source": 3}]}', b"9" * 10**5],
)  # fmt: skip
def test_what_is_no_notebook_is_one_sentence(content: bytes) -> None:
    """Before, a worker was started for it, and the message had the class of an exception."""
    with pytest.raises(UsageError, match=r"`x\.ipynb` is no notebook that can be read"):
        code_of(content, "x.ipynb")
