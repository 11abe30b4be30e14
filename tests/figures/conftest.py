from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest


def make_sweep_table(layers: int, heads: int, *, seed: int = 0, kind: str = "z") -> pd.DataFrame:
    """A table like a sweep's: a residual row per layer and a row per head, better in the middle layers."""
    generator = np.random.default_rng(seed)
    depth = np.arange(layers) / max(layers - 1, 1)
    curve = 0.56 + 0.26 * np.exp(-(((depth - 0.6) / 0.3) ** 2))
    rows = []
    for layer in range(layers):
        places = [("resid_post", pd.NA, curve[layer])]
        places += [(kind, head, 0.5 + (curve[layer] - 0.5) * generator.beta(1.2, 3)) for head in range(heads)]
        for kind_here, head, auroc in places:
            auroc = float(np.clip(auroc + generator.normal(0, 0.008), 0, 1))
            control = float(generator.normal(0.5, 0.015))
            accuracy = 0.5 + (auroc - 0.5) * 0.8
            rows.append(
                {
                    "site": f"{kind_here}.{layer}" + ("" if head is pd.NA else f".{head}"),
                    "kind": kind_here,
                    "layer": layer,
                    "head": head,
                    "auroc": auroc,
                    "auroc_low": auroc - 0.035,
                    "auroc_high": auroc + 0.035,
                    "accuracy": accuracy,
                    "accuracy_low": accuracy - 0.04,
                    "accuracy_high": accuracy + 0.04,
                    "control_auroc": control,
                    "control_auroc_low": control - 0.045,
                    "control_auroc_high": control + 0.045,
                    "control_accuracy": 0.5 + (control - 0.5) * 0.8,
                    "selectivity": auroc - control,
                    "p_best_site": float(np.clip(np.exp(-(auroc - 0.5) * 45), 0.001, 1)),
                    "strength": 0.01,
                }
            )
    return pd.DataFrame(rows).astype({"head": "Int64"})


@pytest.fixture
def sweep_table() -> Callable[..., pd.DataFrame]:
    return make_sweep_table


@pytest.fixture
def transfer_table() -> pd.DataFrame:
    names = ["tweets", "movie", "amazon", "nyt"]
    pairs = [(a, b) for a in names for b in names]
    auroc = [0.85 - 0.06 * abs(names.index(a) - names.index(b)) for a, b in pairs]
    table = pd.DataFrame(pairs, columns=["train", "test"]).assign(auroc=auroc)
    return table.assign(auroc_low=table["auroc"] - 0.03, auroc_high=table["auroc"] + 0.03)
