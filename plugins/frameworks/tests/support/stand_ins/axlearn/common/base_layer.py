"""What is recomputed."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class RematSpec:
    prevent_cse: bool = True
    policy: Any = None
