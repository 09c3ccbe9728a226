"""Both sides derive the same plan, and what is packed comes back whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rollart.weights import describe, make_plan

DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool]

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=8), st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1
)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random bytes (of random truth values, for bool)."""
    random = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=random)
    return flat.view(dtype).reshape(shape)


@settings(deadline=None, max_examples=200)
@given(tensors, st.integers(1, 20), st.integers(0, 1000))
def test_any_state_comes_back_whole_from_buckets_of_any_size(
    described: dict[str, tuple[tuple[int, ...], torch.dtype]], units: int, seed: int
) -> None:
    state = {name: filled(*kind, seed) for name, kind in described.items()}
    plan = make_plan(describe(state), 64 * units)
    buckets = [torch.full((size + 64,), 255, dtype=torch.uint8) for size in plan.bucket_sizes]
    plan.pack(state, buckets)
    back = plan.unpack(buckets)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (back[name], tensor)]
        assert torch.equal(*as_bytes)
    assert all(size == 64 * units for size in plan.bucket_sizes[:-1])
    assert 0 < plan.bucket_sizes[-1] <= 64 * units


@given(tensors, st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_the_tensors(
    described: dict[str, tuple[tuple[int, ...], torch.dtype]], random: object
) -> None:
    rows = [(name, *kind) for name, kind in described.items()]
    plan = make_plan(rows, 256)
    random.shuffle(rows)  # type: ignore[attr-defined]
    assert make_plan(rows, 256) == plan


def test_a_change_of_shape_dtype_name_or_bucket_size_changes_the_digest() -> None:
    plans = [
        make_plan([("a", (2, 3), torch.float32)], 64),
        make_plan([("a", (3, 2), torch.float32)], 64),
        make_plan([("a", (2, 3), torch.int32)], 64),
        make_plan([("b", (2, 3), torch.float32)], 64),
        make_plan([("a", (2, 3), torch.float32)], 128),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_a_state_that_is_not_the_planned_one_is_refused_by_name() -> None:
    plan = make_plan([("a", (2,), torch.float32)], 64)
    buckets = [torch.empty(64, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="a is missing"):
        plan.pack({}, buckets)
    with pytest.raises(ValueError, match=r"a is \(3,\) torch.float32, the weight plan has \(2,\)"):
        plan.pack({"a": torch.zeros(3)}, buckets)


def test_a_bucket_size_that_would_break_the_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="a bucket of 100 bytes cannot be used"):
        make_plan([("a", (2,), torch.float32)], 100)
