"""The rules of a layout, each broken once: which field is wrong, which item of it, and why."""

from typing import Any

import pytest
from attrs import evolve

from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.layout_rules import wrong_with

#: Two pipelines of two stages over two ranks.
LAYOUT = Layout((0, 1, 1, 0), (Pipeline("down", 0, 2, 2), Pipeline("up", 2, 4, 2)))
DOWN, UP = LAYOUT.pipelines


def test_a_layout_that_is_possible() -> None:
    assert wrong_with(LAYOUT, 2) is None
    assert wrong_with(LAYOUT, 2, 4) is None


@pytest.mark.parametrize(
    ("changes", "field", "item", "message"),
    [
        ({"placement": ()}, "placement", None, "there are no stages"),
        ({"placement": (0, 1, 2, 0)}, "placement", 2, "stage 2 is on rank 2"),
        ({"placement": (0, 0, 0, 0)}, "placement", None, "rank 1 holds no stage"),
        ({"pipelines": (DOWN,)}, "pipelines", None, "divide the 4 stages"),
        (
            {"placement": (0, 1, 1), "pipelines": (DOWN, evolve(UP, stop=3))},
            "pipelines",
            1,
            "has 1 stage, the first one has 2",
        ),
        (
            {"pipelines": (DOWN, evolve(UP, microbatches=0))},
            "pipelines",
            1,
            "runs 0 microbatches",
        ),
        ({"pipelines": (DOWN, evolve(UP, name=""))}, "pipelines", 1, "must be a word"),
        (
            {"pipelines": (DOWN, evolve(UP, name="down"))},
            "pipelines",
            0,
            "two have the `name` 'down'",
        ),
        ({"slices": 0}, "slices", None, "it is 0"),
        ({"updates": 3}, "pipelines", 0, "do not divide into 3"),
        ({"edges": ((0, 4),)}, "edges", 0, "the edge from stage 0 to stage 4 leads to"),
        ({"edges": ((2, 0),)}, "edges", 0, "must lead to the next stage there"),
        ({"edges": ((0, 3),)}, "edges", 0, "declare `up` first"),
        ({"edges": ((0, 1), (0, 1))}, "edges", 1, "is there already"),
        ({"skips": ((1, 0),)}, "skips", 0, "does not lead forward"),
        ({"skips": ((0, 1),)}, "skips", 0, "leads to the next stage"),
        ({"frozen": (2,)}, "frozen", 0, "there is no stage 2"),
        ({"frozen": (0, 1)}, "frozen", None, "all stages are frozen"),
        ({"links": (0,)}, "links", None, "1 for 2 ranks"),
        ({"links": (0, -1)}, "links", 1, "rank 1 has the link -1"),
        ({"keepers": (1, 2)}, "keepers", 1, "rank 1 is kept on rank 2"),
    ],
)
def test_each_rule(
    changes: dict[str, Any], field: str, item: int | None, message: str
) -> None:
    wrong = wrong_with(evolve(LAYOUT, **changes), 2)
    assert wrong is not None
    assert (wrong.field, wrong.item) == (field, item)
    assert message in wrong.message


#: Two pipelines of three stages over two ranks, the first of which takes over from the third, that
#: leaves out the last stage.
HANDOVER = Layout(
    (0, 1, 0, 1, 0, 1, 1, 0),
    (
        Pipeline("back", 0, 3, 2),
        Pipeline("other", 3, 6, 2),
        Pipeline("ahead", 6, 8, 2),
    ),
    edges=((6, 1), (7, 2)),
)


def test_a_layout_with_a_pipeline_that_runs_ahead() -> None:
    assert wrong_with(HANDOVER, 2, 4) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": ((6, 1),)}, "`ahead` hands over its last stage, too"),
        ({"edges": ((6, 1), (7, 5))}, "`ahead` hands over to two pipelines"),
        ({"edges": ((4, 2), (7, 2))}, "where that from stage 7 hands"),
        ({"edges": ((7, 2), (3, 7))}, "must lead back"),
        ({"edges": ((7, 2), (0, 1))}, "edges of a stage graph"),
        ({"edges": ((7, 2),), "skips": ((0, 2),)}, "skips"),
        ({"edges": ((7, 2),), "slices": 2}, "slices"),
    ],
)
def test_what_a_handover_keeps_to(changes: dict[str, Any], message: str) -> None:
    wrong = wrong_with(evolve(HANDOVER, **changes), 2)
    assert wrong is not None
    assert wrong.field == "edges"
    assert message in wrong.message


def test_models_run_as_many_microbatches_as_an_edge_needs() -> None:
    models = evolve(
        LAYOUT,
        models=True,
        pipelines=(DOWN, evolve(UP, microbatches=1)),
        edges=((1, 2),),
    )
    wrong = wrong_with(models, 2)
    assert wrong
    assert wrong.message.endswith(
        "leads from the model `down`, which runs 2 microbatches, to `up`, which runs 1"
    )
    assert wrong.help
    assert "replicas of an encoder" in wrong.help
    wrong = wrong_with(evolve(models, edges=()), 2, 4)
    assert wrong
    assert wrong.message == "the first model runs 2 microbatches, `microbatches` is 4"
