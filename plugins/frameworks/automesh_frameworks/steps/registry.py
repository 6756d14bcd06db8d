"""The frameworks whose own training step is searched, by name; imports no adapter."""

from __future__ import annotations

from automesh.plugins.framework import Framework

MAXTEXT = Framework(
    name="maxtext",
    title="MaxText",
    package="maxtext",
    install="`pip install maxtext`",
    module="automesh_frameworks.steps.maxtext",
    former_module="automesh.frameworks.maxtext",
    space="maxtext",
    seen_in="maxtext 0.2.5",
    example="model_name=llama3.1-8b per_device_batch_size=4",
)
LEVANTER = Framework(
    name="levanter",
    title="Levanter",
    package="levanter",
    install="`pip install marin-levanter`",
    module="automesh_frameworks.steps.levanter",
    former_module="automesh.frameworks.levanter",
    space="levanter",
    seen_in="marin-levanter 0.2.227.dev40316220070",
    example="--config_path config.yaml --data.vocab_size 128256",
)
EASYDEL = Framework(
    name="easydel",
    title="EasyDeL",
    package="easydel",
    install="`pip install easydel pillow torch`, then `pip install jax==0.10.2`",
    module="automesh_frameworks.steps.easydel",
    former_module="automesh.frameworks.easydel",
    space="easydel",
    seen_in="easydel 0.3.0",
    example="--config train.yaml",
)
TUNIX = Framework(
    name="tunix",
    title="Tunix",
    package="tunix",
    install="`pip install google-tunix`",
    module="automesh_frameworks.steps.tunix",
    former_module="automesh.frameworks.tunix",
    space="tunix",
    seen_in="google-tunix 0.1.7",
    example="config.yaml batch_size=64 max_target_length=2048",
)
KAULDRON = Framework(
    name="kauldron",
    title="Kauldron",
    package="kauldron",
    install="`uv pip install kauldron`: pip alone may search for versions for half an hour",
    module="automesh_frameworks.steps.kauldron",
    former_module="automesh.frameworks.kauldron",
    space="kauldron",
    seen_in="kauldron 1.4.4",
    example="--cfg=config.py",
)
AXLEARN = Framework(
    name="axlearn",
    title="AXLearn",
    package="axlearn",
    install="put its repository on PYTHONPATH: the package index has one of 2024",
    module="automesh_frameworks.steps.axlearn",
    former_module="automesh.frameworks.axlearn",
    space="axlearn",
    seen_in="AXLearn `34aed43` of July 2026",
    example="--module=text.gpt.c4_trainer --config=fuji-1B-v3",
)

FRAMEWORKS = {one.name: one for one in (MAXTEXT, LEVANTER, EASYDEL, TUNIX, KAULDRON, AXLEARN)}
