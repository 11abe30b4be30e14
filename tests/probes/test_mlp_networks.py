"""Networks: start values as torch's own, settings that are checked."""

import pytest
import torch

from microtome.probes.mlp_networks import MlpSettings, Networks, start_values


def test_start_values_fill_the_range_of_torchs_linear_layer() -> None:
    weights, biases = start_values((64, 16, 1), 0)
    assert [tuple(weight.shape) for weight in weights] == [(64, 16), (16, 1)]
    assert [tuple(bias.shape) for bias in biases] == [(16,), (1,)]
    assert 0.12 < weights[0].abs().max() < 1 / 8
    assert biases[1].abs() < 1 / 4
    again, other = start_values((64, 16, 1), 0), start_values((64, 16, 1), 1)
    torch.testing.assert_close(again[0], weights, atol=0, rtol=0)
    assert not torch.equal(other[0][0], weights[0])


def test_every_site_starts_alike_and_no_view_is_a_copy() -> None:
    networks = Networks(3, (4, 5, 2), 0, torch.device("cpu"))
    rows = torch.randn(1, 7, 4).expand(3, -1, -1)
    logits = networks.logits(rows)
    torch.testing.assert_close(logits[0], logits[2])
    networks.parameters.zero_()
    assert (networks.logits(rows) == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"hidden": ()}, "use fit_logistic"), ({"epochs": 0}, "whole numbers"), ({"learning_rate": 0.0}, "above 0")],
)
def test_settings_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlpSettings(**settings)
