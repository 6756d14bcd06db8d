"""The compiler options that estimates know, and what each changes in the terms of a step.

Any compiler option can be searched along with the mesh. An option without a row here changes no
estimate, and the output says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from automesh.cost.pipeline.terms import PipelineTerms
from automesh.cost.terms import Terms
from automesh.cost.windowed import THRESHOLDS, with_threshold
from automesh.mesh.axes import Scalar
from automesh.platforms.platform import PlatformName


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOption:
    """One option of a platform's compiler.

    Attributes:
      name: as XLA has it.
      apply: returns the terms of the program that the compiler makes with a value of the option. A
        value of the wrong type changes nothing: the compiler refuses it.
    """

    platform: PlatformName
    name: str
    apply: Callable[[Terms, Scalar], Terms]


PRICED_OPTIONS = tuple(
    PricedOption(platform=platform, name=name, apply=with_threshold)
    for platform, name in THRESHOLDS.items()
)


def is_priced(name: str, platform: str) -> bool:
    """Whether estimates for a platform know the effect of an option."""
    return any(option.name == name and option.platform == platform for option in PRICED_OPTIONS)


def priced_among(options: Iterable[tuple[str, Scalar]]) -> tuple[tuple[str, Scalar], ...]:
    """Selects the options of a plan that an estimate depends on."""
    names = {option.name for option in PRICED_OPTIONS}
    return tuple((name, value) for name, value in options if name in names)


def under_options(terms: Terms, options: Iterable[tuple[str, Scalar]]) -> Terms:
    """Returns the terms of the program that the compiler makes with a plan's options."""
    values = dict(options)
    for option in PRICED_OPTIONS:
        if option.platform == terms.platform and option.name in values:
            terms = option.apply(terms, values[option.name])
    return terms


def pipeline_under_options(
    pipeline: PipelineTerms, options: Iterable[tuple[str, Scalar]]
) -> PipelineTerms:
    """Applies a plan's compiler options to the terms of all programs of a pipeline."""
    values = tuple(options)
    kinds = tuple(
        replace(
            one,
            programs=tuple((kind, under_options(terms, values)) for kind, terms in one.programs),
            finish=under_options(one.finish, values),
        )
        for one in pipeline.kinds
    )
    return replace(pipeline, kinds=kinds)
