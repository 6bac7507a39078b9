"""Keyword arguments of a step, by microbatch: tensors are cut along the rows of the batch, and
other values go to every microbatch.

    step(tokens, targets, mask=mask, causal=True)     4 microbatches of 2 rows

    tokens   (8, 64)   mask   (8, 64)    rows 0 1, rows 2 3, …
                       causal True       True, True, …

A tensor with another number of rows is refused, and so is a square one whose rows may be positions:
it is unclear whether to cut it.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from torch import Tensor

from schedlang.runtime.announcement import Rows
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten
from schedlang.runtime.values import cut


class Keywords:
    """The keyword arguments of a step or an evaluation whose batch has these rows, along the
    dimension `dim`.

    `inputs` are this rank's inputs, if it has any.
    """

    def __init__(self, rows: Rows, dim: int, inputs: Any, has_slices: bool) -> None:
        self._rows = rows
        self._dim = dim
        self._has_slices = has_slices
        tensors, _ = tree_flatten(inputs)
        #: The lengths of its sequences; tensors without a dimension of positions have none.
        self._positions = {
            each.shape[0 if dim else 1]
            for each in tensors
            if isinstance(each, Tensor)
            and each.ndim > (2 if each.is_floating_point() else 1)
        }

    def of_round(
        self,
        keywords: Mapping[str, Any],
        options: Sequence[Mapping[str, Any]] | None,
        begin: int,
        first: int,
        sizes: Sequence[int],
    ) -> Sequence[Mapping[str, Any]]:
        """The keyword arguments and the options of some microbatches, from number `begin` on. In a
        batch of one piece, these begin with row `first` and have `sizes` rows; in a list of
        microbatches, `first` is the index of the first.
        """
        of_round: Sequence[Mapping[str, Any]] = []
        if options is not None:
            whole = ceil(self._rows.total / self._rows.of_microbatch)
            if len(options) != whole:
                raise PipelineError(
                    f"`options` are {len(options)}, one for each microbatch, and there are {whole} "
                    "microbatches"
                )
            of_round = options[begin : begin + len(sizes)]
        if not keywords:
            return of_round
        return with_options(self.by_microbatch(keywords, first, sizes), of_round)

    def by_microbatch(
        self, keywords: Mapping[str, Any], first: int, sizes: Sequence[int]
    ) -> list[dict[str, Any]]:
        """The keyword arguments of some microbatches, as above."""
        if not sizes:
            return []
        columns = {
            name: self._parts(name, value, first, sizes)
            for name, value in keywords.items()
        }
        return [
            {name: column[place] for name, column in columns.items()}
            for place in range(len(sizes))
        ]

    def _parts(
        self, name: str, value: Any, first: int, sizes: Sequence[int]
    ) -> Sequence[Any]:
        if isinstance(value, list):
            return self._of_list(name, value)[first : first + len(sizes)]
        leaves, tree = tree_flatten(value)
        columns = [self._of_leaf(name, leaf, first, sizes) for leaf in leaves]
        return [
            tree_unflatten([column[place] for column in columns], tree)
            for place in range(len(sizes))
        ]

    def _of_list(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        """Check that a list has a value for each microbatch, as the list of inputs has."""
        if not self._rows.is_list:
            raise self._unclear(
                name,
                f"is a list of {len(values)}, and `inputs` are a batch in one piece",
                "a value for each microbatch",
            )
        if len(values) != self._rows.total:
            raise PipelineError(
                f"`{name}` is a list of {len(values)}, one for each microbatch, and there are "
                f"{self._rows.total} microbatches"
            )
        return values

    def _of_leaf(
        self, name: str, value: Any, first: int, sizes: Sequence[int]
    ) -> Sequence[Any]:
        """Cut a tensor into parts; other values are the same for all microbatches."""
        if not isinstance(value, Tensor) or not value.ndim:
            return [value] * len(sizes)
        shape = [*value.shape]
        if self._rows.is_list:
            raise self._unclear(
                name,
                f"is a tensor {shape}, and `inputs` are a list of microbatches",
                "the arguments of all of them in one piece",
            )
        rows = self._rows.total
        if value.ndim <= self._dim or value.shape[self._dim] != rows:
            raise self._unclear(
                name,
                f"is a tensor {shape}, and the batch has {rows} rows along dimension {self._dim}",
                f"{rows} rows, which are cut as those of `inputs`",
            )
        if value.ndim > 1 and self._has_slices:
            raise self._unclear(
                name,
                f"is a tensor {shape}, and the plan has slices",
                "cut into slices as `inputs` are",
            )
        if self._may_be_positions(value):
            raise self._unclear(
                name,
                f"is a tensor {shape}, whose rows may be those of the batch or positions",
                f"{rows} rows, which are cut as those of `inputs`",
            )
        return cut(value.narrow(self._dim, first, sum(sizes)), sizes, self._dim)

    def _may_be_positions(self, value: Tensor) -> bool:
        """Whether a tensor with as many rows as the batch may be a mask of positions, since this
        rank's sequences have that length.
        """
        rows = self._rows.total
        return rows > 1 and value.shape[:2] == (rows, rows) and rows in self._positions

    def _unclear(self, name: str, found: str, meant: str) -> PipelineError:
        return PipelineError(
            f"`{name}` {found}: it may be {meant}, or the same for all microbatches. Say which by "
            f"`options=[{{'{name}': …}}, …]`, a dictionary for each microbatch, which is not cut"
        )


def with_options(
    keywords: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Merge the keyword arguments and the options of each microbatch, if there are options."""
    if not options:
        return keywords
    both = {*keywords[0]} & {*options[0]}
    if both:
        names = ", ".join(f"`{name}`" for name in sorted(both))
        raise PipelineError(f"{names} is in `options`, and an argument beside them")
    return [{**one, **other} for one, other in zip(keywords, options, strict=True)]
