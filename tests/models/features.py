"""All features, and models that are made of several."""

from functools import cache

from torch import nn

from tests.models import between
from tests.models.families import (
    float8,
    gradients,
    layers,
    meshes,
    passing,
    pretrained,
    scripts,
    state,
    training,
)
from tests.models.loops import looped
from tests.models.model import COMMON, FEATURES, Feature, Model, mean_square, seed_all

#: The modules that have filled `FEATURES`.
FAMILIES = (
    layers,
    float8,
    state,
    gradients,
    passing,
    training,
    scripts,
    meshes,
    pretrained,
)

_BLOCK = " + "
_STAGE = " | "
_WAY = " || "
_LOOP = " & "


def find(name: str) -> Feature:
    """The feature of this name, or a model that is made of some: `gru + norms | dropout || adamw`
    has stages with the blocks of these features, where there are more than two again from the
    first one on, and is trained as the feature `adamw` is. Where that is `between`, the stages are
    of words that stand there. In `gru | norms || adamw & clipped`, words of `loops` follow, which
    the training has as well.
    """
    if name in FEATURES:
        return FEATURES[name]
    name, *words = name.split(_LOOP)
    if words:
        return looped(find(name), words)
    stages, way = parts_of(name)
    return between.feature_of(name, stages) if way == between.WAY else _mixed(name)


def name_of(stages: list[list[str]], way: str) -> str:
    """The name of a model that is made of some features."""
    return _STAGE.join(map(_BLOCK.join, stages)) + _WAY + way


def in_loop(name: str, words: list[str]) -> str:
    """The name of a model that is trained in a loop of these words."""
    return _LOOP.join([name, *words])


def parts_of(name: str) -> tuple[list[list[str]], str]:
    """The blocks of each stage of such a model, and the way in which it is trained."""
    body, _, way = name.partition(_WAY)
    return [stage.split(_BLOCK) for stage in body.split(_STAGE)], way


@cache
def _mixed(name: str) -> Feature:
    stages, way = parts_of(name)
    parts = [FEATURES[block] for stage in stages for block in stage] + [FEATURES[way]]

    def build(count: int) -> Model:
        model = FEATURES[way].model(count)
        model.tolerance = 1e-9
        model.stages = [
            nn.Sequential(
                *(
                    _stage(block, place, number, count)
                    for place, block in enumerate(blocks)
                )
            )
            for number, blocks in (
                (number, stages[number % len(stages)]) for number in range(count)
            )
        ]
        return model

    return Feature(
        name,
        "mixed",
        name,
        build,
        draws=any(part.draws for part in parts),
        not_for=frozenset().union(*(part.not_for for part in parts)),
    )


def _stage(block: str, place: int, number: int, count: int) -> nn.Module:
    """A stage of a feature, with weights of its own."""
    # Two blocks of one feature, in two places, must not have the same weights by chance.
    seed_all(100 * number + place)
    return FEATURES[block].build(count).stages[number]


@cache
def blocks() -> list[str]:
    """The features whose stages can follow one another, but for those that are about scripts."""
    return [
        name
        for name, feature in FEATURES.items()
        if _is_common(feature) and feature.family != "scripts"
    ]


@cache
def ways() -> list[str]:
    """The features that are about training."""
    return [
        name
        for name, feature in FEATURES.items()
        if _is_common(feature) and feature.family in ("training", "scripts")
    ]


def _is_common(feature: Feature) -> bool:
    # What takes or gives something else than others, or cannot be trained, has no place in a chain.
    if feature.is_mistake or feature.mesh or feature.not_for - {"updates", "frozen"}:
        return False
    model = feature.model(3)
    return (
        model.batch is COMMON
        and model.loss is mean_square
        and not model.tied
        and not model.options
    )
