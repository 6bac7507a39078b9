"""Tensors that are rounded on their way are off by no more than the rounding."""

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch", exc_type=ImportError
)

from attrs import evolve  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from schedlang import compile  # noqa: E402
from schedlang.runtime import PipelineError  # noqa: E402
from schedlang.runtime.precision import Rounding, rounding_of  # noqa: E402

#: Half of the distance of neighbouring numbers near 1; and what is lost of the smallest, of the
#: largest number.
ERRORS = {torch.bfloat16: (2**-8, 0.0), torch.float16: (2**-11, 2**-39)}
TYPES = {torch.float32: 38, torch.float64: 300}


@given(
    st.sampled_from([*ERRORS]),
    st.sampled_from([*TYPES]),
    st.integers(),
    st.floats(-1, 1),
    st.floats(0, 30),
)
def test_the_error_is_that_of_the_rounding(
    to: torch.dtype, type: torch.dtype, seed: int, where: float, spread: float
) -> None:
    """For tensors as large and as small as their type has them, with numbers of very different
    sizes.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    sizes = 10 ** (
        (torch.rand(50, generator=generator, dtype=torch.float64) - 1) * spread
    )
    scale = 10.0 ** ((38 if to == torch.bfloat16 else TYPES[type]) * where - 1)
    tensor = (
        (torch.randn(50, generator=generator, dtype=torch.float64) * sizes * scale)
        .to(type)
        .view(5, 10)
    )
    rounding = Rounding(to)
    packed = rounding.pack(tensor)
    assert packed.dtype == to
    assert packed.shape == rounding.room(tensor).shape
    found = rounding.unpack(packed, tensor)
    assert (found.dtype, found.shape) == (type, tensor.shape)
    relative, absolute = ERRORS[to]
    tiny = torch.finfo(to if to == torch.bfloat16 else type).tiny
    bound = relative * tensor.abs() + absolute * tensor.abs().max() + tiny
    assert bool(((found - tensor).abs() <= bound).all())


@pytest.mark.parametrize("to", [*ERRORS])
def test_zeros_and_nothing_stay_what_they_are(to: torch.dtype) -> None:
    for tensor in (torch.zeros(3, 2), torch.zeros(0, 4)):
        assert torch.equal(
            Rounding(to).unpack(Rounding(to).pack(tensor), tensor), tensor
        )


@pytest.mark.parametrize("to", [*ERRORS])
def test_what_is_no_number_stays_so(to: torch.dtype) -> None:
    """For those who look for it, to skip an update."""
    for bad in (torch.inf, -torch.inf, torch.nan):
        tensor = torch.tensor([1.0, bad])
        found = Rounding(to).unpack(Rounding(to).pack(tensor), tensor)
        assert not found[1].isfinite()


@pytest.mark.parametrize("to", [*ERRORS])
def test_other_tensors_go_as_they_are(to: torch.dtype) -> None:
    for tensor in (
        torch.arange(4),
        torch.ones(4, dtype=to).view(2, 2).T,
        torch.ones(3, dtype=torch.complex64),
    ):
        packed = Rounding(to).pack(tensor)
        assert packed.dtype == tensor.dtype
        assert torch.equal(packed, tensor)
        assert packed.is_contiguous()


def test_the_type_is_the_programs_or_the_scripts() -> None:
    plan = compile("1f1b")
    rounded = evolve(plan, message_type="bf16")
    assert rounding_of(rounded, None) == rounding_of(plan, torch.bfloat16)
    assert rounding_of(rounded, torch.bfloat16).type == torch.bfloat16
    with pytest.raises(PipelineError, match="and the plan says `send bf16`"):
        rounding_of(rounded, torch.float16)
    with pytest.raises(PipelineError, match="it must be torch"):
        rounding_of(plan, torch.float32)
