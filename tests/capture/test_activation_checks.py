"""Finite or not: the fast test never misses one, and never cries wolf."""

import numpy as np
import pytest
import torch

from microtome.capture.activation_checks import as_tensors, check_finite
from microtome.capture.sites import Site


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("values", [[torch.nan], [torch.inf], [torch.inf, -torch.inf]])
def test_every_nonfinite_value_is_found(dtype, values):
    tensor = torch.zeros(5, 3, 2, dtype=dtype)
    for row, value in enumerate(values, start=2):
        tensor[row, 1, 0] = value
    with pytest.raises(ValueError, match=f"z.5 is NaN or infinite in {len(values)} of 5 rows, first in row 2"):
        check_finite(Site("z", 5), tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_values_are_no_infinities(dtype):
    tensor = torch.full((40, 40), torch.finfo(dtype).max, dtype=dtype)
    assert not torch.isfinite(tensor.sum()), "the sum overflows, the values do not"
    check_finite(Site("z", 5), tensor)


def test_overflow_of_float16_is_explained():
    with pytest.raises(ValueError, match=r"float16 overflows at 65504: use torch.float32 or torch.bfloat16"):
        check_finite(Site("mlp_out", 1), torch.tensor([[1e5]]).half())


def test_a_masked_array_is_refused():
    with pytest.raises(TypeError, match="is a masked array"):
        as_tensors({"a.0": np.ma.array([[999.0, 1.0]], mask=[[True, False]])})
