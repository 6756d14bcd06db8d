"""The TFDS of Kauldron's, of which one is mocked."""

import contextlib
from types import SimpleNamespace


class _Testing:
    mocked = 0

    @contextlib.contextmanager
    def mock_data(self, *, num_examples):
        self.mocked = num_examples
        try:
            yield
        finally:
            self.mocked = 0


tfds = SimpleNamespace(testing=_Testing())
