"""Which frameworks a search knows by name, and what it takes for each of them (no jax)."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.program.nouns import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework whose own training step can be searched: `automesh search NAME -- ARGUMENTS`.

    Attributes:
      name: what the user calls it.
      title: how it writes its own name.
      package: what Python imports.
      install: what to do where it is missing.
      module: its adapter, with a function `build`; only workers import it.
      space: search space that is taken if no other is named.
      seen_in: the package and the version with which the adapter was tried.
      example: arguments that a user may start from.
    """

    name: str
    title: str
    package: str
    install: str
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
            title="MaxText",
            package="maxtext",
            install="`pip install maxtext`",
            module="automesh.frameworks.maxtext",
            space="maxtext",
            seen_in="maxtext 0.2.5",
            example="model_name=llama3.1-8b per_device_batch_size=4",
        ),
        Framework(
            name="levanter",
            title="Levanter",
            package="levanter",
            install="`pip install marin-levanter`",
            module="automesh.frameworks.levanter",
            space="levanter",
            seen_in="marin-levanter 0.2.227.dev40316220070",
            example="--config_path config.yaml --data.vocab_size 128256",
        ),
        Framework(
            name="easydel",
            title="EasyDeL",
            package="easydel",
            install="`pip install easydel pillow torch`, then `pip install jax==0.10.2`",
            module="automesh.frameworks.easydel",
            space="easydel",
            seen_in="easydel 0.3.0",
            example="--config train.yaml",
        ),
        Framework(
            name="tunix",
            title="Tunix",
            package="tunix",
            install="`pip install google-tunix`",
            module="automesh.frameworks.tunix",
            space="tunix",
            seen_in="google-tunix 0.1.7",
            example="config.yaml batch_size=64 max_target_length=2048",
        ),
        Framework(
            name="kauldron",
            title="Kauldron",
            package="kauldron",
            install="`uv pip install kauldron`: pip alone may search for versions for half an hour",
            module="automesh.frameworks.kauldron",
            space="kauldron",
            seen_in="kauldron 1.4.4",
            example="--cfg=config.py",
        ),
        Framework(
            name="axlearn",
            title="AXLearn",
            package="axlearn",
            install="put its repository on PYTHONPATH: the package index has one of 2024",
            module="automesh.frameworks.axlearn",
            space="axlearn",
            seen_in="AXLearn `34aed43` of July 2026",
            example="--module=text.gpt.c4_trainer --config=fuji-1B-v3",
        ),
    )
}


def framework_of(entry: Entry) -> Framework | None:
    """The framework whose adapter `entry` is; None if it is code of the user's own."""
    if entry.kind != "module":
        return None
    return next((one for one in FRAMEWORKS.values() if one.module == entry.location), None)
