"""pool_last: the last tokens of each text, and no others."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.probes.pooling import pool_last


def per_token() -> Activations:
    """Three texts of 3, 1 and 2 tokens, rows out of order."""
    rows = pd.DataFrame({"text": [7, 7, 2, 7, 5, 5], "position": [2, 0, 0, 1, 0, 1], "label": [1, 1, 0, 1, 0, 0]})
    values = torch.arange(6.0)[:, None] * torch.tensor([1.0, 10.0])
    return Activations.from_arrays(
        {"resid_post.0": values, "z.1": values[:, None].expand(6, 3, 2).contiguous()}, rows=rows.assign(token="")
    )


def test_the_last_token_is_the_one_of_highest_position() -> None:
    pooled = pool_last(per_token())
    assert pooled.rows["text"].tolist() == [7, 2, 5]
    assert pooled.rows["position"].tolist() == [2, 0, 1]
    assert pooled.rows["label"].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(pooled["resid_post.0"], [[0, 0], [2, 20], [5, 50]])


def test_the_mean_of_the_last_two_takes_what_there_is() -> None:
    pooled = pool_last(per_token(), 2)
    np.testing.assert_array_equal(pooled["resid_post.0"], [[1.5, 15], [2, 20], [4.5, 45]])
    np.testing.assert_array_equal(pooled["z.1"][:, 2], pooled["resid_post.0"])
    assert pooled.rows["position"].tolist() == [-1, 0, -1]
    torch.testing.assert_close(pool_last(per_token(), 99)["resid_post.0"][0], torch.tensor([4 / 3, 40 / 3]))


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="tokens=0"):
        pool_last(per_token(), 0)
    tokens = per_token()
    twice = Activations(tokens.rows.assign(position=0), tokens.tensors, {})
    with pytest.raises(ValueError, match="two rows of position 0"):
        pool_last(twice)
