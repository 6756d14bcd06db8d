"""Which frameworks a search knows by name, and what it takes for each of them (no jax)."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.program.nouns import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework whose own training step can be searched: `automesh search NAME -- ARGUMENTS`.

    Attributes:
      name: what the user calls it.
      module: its adapter, with a function `build`; only workers import it.
      space: search space that is taken if no other is named.
      seen_in: the version with which the adapter was tried.
      example: arguments that a user may start from.
    """

    name: str
    module: str
    space: str
    seen_in: str
    example: str

    def entry(self, argv: tuple[str, ...]) -> Entry:
        """What a worker loads, with the framework's own arguments."""
        return Entry(kind="module", location=self.module, argv=argv)


FRAMEWORKS = {
    one.name: one
    for one in (
        Framework(
            name="maxtext",
            module="automesh.frameworks.maxtext",
            space="maxtext",
            seen_in="0.2.5",
            example="model_name=llama3.1-8b per_device_batch_size=4",
        ),
    )
}


def framework_of(entry: Entry) -> Framework | None:
    """The framework whose adapter `entry` is; None if it is code of the user's own."""
    if entry.kind != "module":
        return None
    return next((one for one in FRAMEWORKS.values() if one.module == entry.location), None)
