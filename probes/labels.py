"""Binary labels of a sweep: which rows are positive, checked."""

import numpy as np
import pandas as pd
from jaxtyping import Bool

_SHOWN = 5


def binary_labels(labels, *, n_rows: int) -> tuple[Bool[np.ndarray, " example"], tuple]:
    """Which rows hold the larger of the two values, and both values, smaller first.

    Raises ValueError for another length or shape, a missing label (NaN, None), one value, or more than two.
    """
    labels = labels.numpy(force=True) if hasattr(labels, "numpy") else labels
    series = pd.Series(labels).reset_index(drop=True) if np.ndim(labels) == 1 else None
    if series is None or len(series) != n_rows:
        raise ValueError(f"labels has shape {np.shape(labels)}, activations {n_rows} rows. Pass one label per row.")
    if series.isna().any():
        raise ValueError(
            f"{int(series.isna().sum())} of {n_rows} labels are missing (first: row {int(series.isna().argmax())}). "
            "Keep the others: acts = acts.select_rows(acts.rows[NAME].notna())."
        )
    codes, values = pd.factorize(series, sort=True)
    if len(values) != 2:
        shown = ", ".join(repr(value) for value in values[:_SHOWN].tolist()) + (", ..." if len(values) > _SHOWN else "")
        advice = (
            "A probe needs both classes."
            if len(values) == 1
            else "Make it two: labels=(acts.rows[NAME] == VALUE) for a class, labels=(acts.rows[NAME] > 0) for numbers."
        )
        raise ValueError(f"labels holds {len(values)} different value(s) ({shown}); a sweep needs two. {advice}")
    return codes == 1, tuple(values.tolist())
