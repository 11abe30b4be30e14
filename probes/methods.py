"""The probes a sweep can fit, by name: what each takes and from which strengths it chooses.

logistic             L2-penalised logistic regression, of two or of several classes; the default for classes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from microtome.probes.logistic_solver import default_strengths
from microtome.probes.nested_fit import NestedFit, nested_fits
from microtome.probes.target import Kind

DEFAULT: dict[Kind, str] = {"binary": "logistic", "classes": "logistic", "numbers": "ridge"}


@dataclass(frozen=True)
class ProbeMethod:
    """fits: features, labellings, test and nested masks, strengths -> one NestedFit per site.

    default_strengths: by the width of a site.
    """

    name: str
    fits: Callable[..., list[NestedFit]]
    default_strengths: Callable[[int], Sequence[float]]


def probe_method(name: str | None, kind: Kind, *, class_weight: Literal["balanced"] | None = None) -> ProbeMethod:
    """The method of that name for a kind of target; the default one if None.

    Raises ValueError for a name or a combination there is not.
    """
    name = name or DEFAULT[kind]
    methods = {
        ("logistic", "binary"): ProbeMethod(name, partial(nested_fits, class_weight=class_weight), default_strengths)
    }
    if (name, kind) not in methods:
        raise ValueError(f"probe={name!r} of a {kind} target: there are {sorted(n for n, k in methods if k == kind)}.")
    return methods[name, kind]
