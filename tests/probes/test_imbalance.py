import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score

from microtome.probes.imbalance import average_precision, macro_f1


@pytest.mark.parametrize("decimals", [8, 1, 0])
def test_average_precision_is_scikit_learns(decimals):
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(300, generator=generator) < 0.1
    scores = (torch.randn(6, 300, generator=generator) + torch.arange(6)[:, None] * positive).round(decimals=decimals)
    found = average_precision(scores, positive)
    for row, value in zip(scores, found.tolist(), strict=True):
        assert value == pytest.approx(average_precision_score(positive, row))
    each = torch.rand(6, 300, generator=generator) < 0.3
    for row, labels, value in zip(scores, each, average_precision(scores, each).tolist(), strict=True):
        assert value == pytest.approx(average_precision_score(labels, row))


def test_a_constant_score_has_the_share_of_positives():
    positive = torch.arange(50) % 10 == 0
    assert average_precision(torch.zeros(1, 50), positive).item() == pytest.approx(0.1)
    assert average_precision(positive.float(), positive).item() == 1.0


def test_macro_f1_is_scikit_learns():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (200,), generator=generator)
    answers = torch.where(
        torch.rand(5, 200, generator=generator) < 0.6, labels, torch.randint(4, (5, 200), generator=generator)
    )
    answers[4] = 0
    for row, value in zip(answers, macro_f1(answers, labels).tolist(), strict=True):
        assert value == pytest.approx(f1_score(labels, row, average="macro", zero_division=0))
    assert macro_f1(labels, labels, n_classes=5).item() == pytest.approx(0.8)


def test_bad_input_is_explained():
    with pytest.raises(ValueError, match="No label is positive"):
        average_precision(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="NaN"):
        average_precision(torch.tensor([0.0, float("nan")]), torch.tensor([True, False]))
    with pytest.raises(ValueError, match="answers hold 0 to 3; classes are 0 to 2"):
        macro_f1(torch.arange(4), torch.zeros(4, dtype=torch.int64), n_classes=3)
