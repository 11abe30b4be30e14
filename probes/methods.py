"""The probes a sweep can fit, by name: what each takes and from which strengths it chooses.

    logistic             L2-penalised logistic regression (`nested_fit`, `multinomial_fits`); the default for classes
    ridge                least squares with a penalty, from moments (`moment_fits`); the default for numbers
    lda                  shrunken linear discriminant analysis, from moments
    mass_mean            difference of the class means, from moments
    mass_mean_corrected  the same times the inverse of the covariance within classes
    sparse_K             logistic regression on the K features that a filter ranks first in each fold (`sparse`)

Probes from moments read rows in chunks, so that they also do for a store that is larger than memory.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from microtome.probes.logistic_solver import default_strengths
from microtome.probes.moment_fits import DEFAULT_STRENGTHS, moment_fits, moment_fits_of_chunks
from microtome.probes.multinomial_fits import multinomial_fits
from microtome.probes.nested_fit import NestedFit, nested_fits
from microtome.probes.sparse import sparse_fits
from microtome.probes.target import Kind

DEFAULT: dict[Kind, str] = {"binary": "logistic", "classes": "logistic", "numbers": "ridge"}
_OF_KIND: dict[str, tuple[Kind, ...]] = {
    "logistic": ("binary", "classes"),
    "ridge": ("binary", "classes", "numbers"),
    "lda": ("binary", "classes"),
    "mass_mean": ("binary", "classes"),
    "mass_mean_corrected": ("binary", "classes"),
    "sparse_K": ("binary",),
}
_SPARSE = re.compile(r"sparse_([1-9]\d*)")


@dataclass(frozen=True)
class ProbeMethod:
    """fits: features, labellings, test and nested masks, strengths -> one NestedFit per site.

    fits_of_chunks: the same of rows that come in chunks, without nested masks; None where rows must be in memory.
    default_strengths: by the width of a site.
    """

    name: str
    fits: Callable[..., list[NestedFit]]
    fits_of_chunks: Callable[..., list[NestedFit]] | None
    default_strengths: Callable[[int], Sequence[float]]

    def require(self, folds: int) -> None:
        """Raise ValueError for too few outer folds: probes from moments choose strengths on the other outer folds."""
        if folds < 3 and self.fits_of_chunks is not None:
            raise ValueError(
                f"folds={folds}: inner folds of a {self.name} probe are the other outer ones, so it needs 3 or more."
            )


def probe_method(name: str | None, kind: Kind, *, class_weight: Literal["balanced"] | None = None) -> ProbeMethod:
    """The method of that name for a kind of target; the default one if None.

    Raises ValueError for a name or a combination there is not.
    """
    if class_weight not in (None, "balanced"):
        raise ValueError(f"class_weight={class_weight!r}; give None or 'balanced'.")
    name = name or DEFAULT[kind]
    sparse = _SPARSE.fullmatch(name)
    if kind not in _OF_KIND.get("sparse_K" if sparse else name, ()) or name == "sparse_K":
        known = sorted(method for method, kinds in _OF_KIND.items() if kind in kinds)
        raise ValueError(f"probe={name!r} for a target of {kind}: give one of {', '.join(known)}.")
    if name == "logistic":
        solver = nested_fits if kind == "binary" else multinomial_fits
        return ProbeMethod(name, partial(solver, class_weight=class_weight), None, default_strengths)
    if class_weight is not None:
        raise ValueError(f"class_weight={class_weight!r} is for the logistic probe; {name} weighs every row the same.")
    if sparse:
        k = int(sparse[1])
        return ProbeMethod(name, partial(sparse_fits, k=k), None, lambda width: default_strengths(min(k, width)))
    return ProbeMethod(
        name,
        partial(moment_fits, method=name),
        partial(moment_fits_of_chunks, method=name),
        lambda width: DEFAULT_STRENGTHS,
    )
