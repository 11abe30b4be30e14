"""Moments of features and a concept, a batch at a time: all that least-squares erasure needs to know of the rows.

Per site n, the mean of x, S = sum (x - m)(x - m)', and for the concept z (one-hot classes, or numbers) its mean, its
spread and the cross sum R = sum (x - m)(z - m_z)'. Two parts join exactly (Chan, Golub & LeVeque 1983):
S = S_1 + S_2 + d d' n_1 n_2 / n with d = m_2 - m_1, R likewise. A class that a part has not seen is a column of zeros
there, so classes may come later. Everything in float64.
"""

from dataclasses import dataclass

from jaxtyping import Float, Float64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ConceptMoments:
    """Moments of some rows; sums are about the means, in the units of features and concept."""

    count: int
    mean: Float64[Tensor, "site feature"]
    scatter: Float64[Tensor, "site feature feature"]
    concept_mean: Float64[Tensor, " concept"]
    concept_scatter: Float64[Tensor, " concept"]
    cross: Float64[Tensor, "site feature concept"]

    def joined(self, other: "ConceptMoments") -> "ConceptMoments":
        """Moments of the rows of both; the concept columns must be the same."""
        count = self.count + other.count
        both = self.count * other.count / count
        moved, moved_concept = other.mean - self.mean, other.concept_mean - self.concept_mean
        return ConceptMoments(
            count,
            self.mean + moved * (other.count / count),
            self.scatter + other.scatter + both * moved[:, :, None] * moved[:, None, :],
            self.concept_mean + moved_concept * (other.count / count),
            self.concept_scatter + other.concept_scatter + both * moved_concept.square(),
            self.cross + other.cross + both * moved[:, :, None] * moved_concept,
        )

    def with_columns(self, places: list[int], width: int) -> "ConceptMoments":
        """The same moments with concept column i at `places[i]` of `width` columns, zeros elsewhere."""

        def spread(part: Tensor) -> Tensor:
            wider = part.new_zeros(*part.shape[:-1], width)
            wider[..., places] = part
            return wider

        return ConceptMoments(
            self.count,
            self.mean,
            self.scatter,
            spread(self.concept_mean),
            spread(self.concept_scatter),
            spread(self.cross),
        )


def concept_moments(
    features: Float[Tensor, "site example feature"], concept: Float[Tensor, "_ concept"]
) -> ConceptMoments:
    """Moments of these rows, in two passes.

    Raises ValueError for no rows, other numbers of rows, NaN or infinity.
    """
    if features.shape[1] != len(concept) or len(concept) == 0:
        raise ValueError(f"features have {features.shape[1]} rows, the concept {len(concept)}. Pass one entry per row.")
    for name, values in (("features", features), ("concept", concept)):
        if not values.isfinite().all():
            raise ValueError(f"{name} hold NaN or infinity. Drop those rows, or fix the capture.")
    features, concept = features.double(), concept.double()
    mean, concept_mean = features.mean(1), concept.mean(0)
    centred, centred_concept = features - mean[:, None], concept - concept_mean
    return ConceptMoments(
        len(concept),
        mean,
        centred.mT @ centred,
        concept_mean,
        centred_concept.square().sum(0),
        centred.mT @ centred_concept,
    )
