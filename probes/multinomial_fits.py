"""Nested cross-validation of many sites' multinomial probes: as `nested_fit`, with a logit for every class.

Losses are -log2 softmax(z)_y in bits per row; a probe that answers the class shares costs their entropy.
"""

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from microtome.probes.metrics import class_loss_bits
from microtome.probes.multinomial_solver import fit_multinomial
from microtome.probes.nested_fit import NestedFit, nested_search


def multinomial_fits(
    features: Float[Tensor, "site example feature"],
    labellings: Int64[Tensor, "labelling example"],
    test: Bool[Tensor, "fold example"],
    nested: Bool[Tensor, "fold inner example"],
    strengths: Sequence[float] | None = None,
    *,
    class_weight: Literal["balanced"] | None = None,
) -> list[NestedFit]:
    """Fit all labellings of each site over outer folds `test`, inner folds `nested` (`nested_folds`) and strengths.

    Labellings hold class numbers 0..K-1. Scores are `[labelling, example, class]` logits that sum to zero over the
    classes, coefficients `[class, feature]`. Strengths ascend; `default_strengths` of the width if None. Raises what
    `fit_multinomial` raises: NaN or infinite features, a training mask without a class under a labelling.
    """
    n_classes = int(labellings.max()) + 1

    def solve(features: Tensor, labellings: Tensor, train: Tensor, strengths: Tensor, *, tolerance: float):
        return fit_multinomial(
            features, labellings, train, strengths, n_classes=n_classes, class_weight=class_weight, tolerance=tolerance
        )

    return nested_search(
        features, labellings, test, nested, strengths, solve=solve, loss=_loss, class_weight=class_weight
    )


def _loss(logits: Float[Tensor, "*probe class example"], codes: Int64[Tensor, "*#probe example"]) -> Tensor:
    return class_loss_bits(logits.movedim(-2, -1), codes)
