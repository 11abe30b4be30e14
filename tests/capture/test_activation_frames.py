"""Activations as a table."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.activations import Activations


@pytest.fixture
def acts() -> Activations:
    generator = torch.Generator().manual_seed(0)
    arrays = {"resid_post.2": torch.randn(3, 2, generator=generator), "z.1": torch.randn(3, 2, 2, generator=generator)}
    return Activations.from_arrays(arrays, labels=[0, 1, 0])


def test_components_stand_in_columns_of_their_own(acts):
    frame = acts.to_frame()
    assert list(frame)[:4] == ["label", "text", "position", "token"]
    names = ["resid_post.2[0]", "resid_post.2[1]", "z.1.0[0]", "z.1.0[1]", "z.1.1[0]", "z.1.1[1]"]
    assert list(frame)[4:] == names
    pd.testing.assert_frame_equal(frame[list(acts.rows)], acts.rows)
    values = torch.cat([acts["resid_post.2"], acts["z.1"].flatten(1)], dim=1)
    assert np.array_equal(frame[names].to_numpy(), values.numpy())


def test_norms_are_those_of_the_components(acts):
    frame = acts.to_frame(values="norms")
    assert list(frame)[4:] == ["resid_post.2", "z.1.0", "z.1.1"]
    np.testing.assert_allclose(frame["z.1.1"], np.linalg.norm(acts["z.1"][:, 1].numpy(), axis=1), rtol=1e-6)


def test_the_table_does_not_share_memory_with_the_tensors(acts):
    frame, before = acts.to_frame(), acts["resid_post.2"][0, 0].item()
    acts["resid_post.2"][0, 0] += 1
    assert frame["resid_post.2[0]"][0] == before


def test_half_precision_becomes_single():
    frame = Activations.from_arrays({"a": torch.ones(2, 2, dtype=torch.bfloat16)}).to_frame()
    assert frame["a[0]"].dtype == np.float32


def test_wide_tables_are_refused_with_a_way_out():
    acts = Activations.from_arrays({"a": torch.zeros(5001, 1000)})
    with pytest.raises(ValueError, match=r"5,001 rows x 1,000 columns is over 5,000,000 cells. Narrow it with sel"):
        acts.to_frame()
    assert len(acts.to_frame(values="norms")) == 5001


def test_unknown_values(acts):
    with pytest.raises(ValueError, match='values=\'means\': expected "components" or "norms"'):
        acts.to_frame(values="means")
