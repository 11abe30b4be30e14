"""Every function that takes `documents` takes names, also as a column of a table whose index is not 0, 1, 2."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from microtome.capture.collect import capture
from microtome.lenses.attention_lens_rows import lens_rows
from microtome.lenses.attention_lens_training import train_attention_lens
from microtome.lenses.documents import document_numbers
from microtome.lenses.lens_statistics import lens_statistics
from microtome.lenses.logit_lens import logit_lens, logit_lens_of
from microtome.lenses.moments_pass import moments_of, moments_of_activations
from microtome.lenses.ridge_lens import ridge_to_last
from microtome.lenses.tuned_training import TunedSettings, fit_tuned_lens

TEXTS = [np.random.default_rng(seed).integers(3, 120, 12).tolist() for seed in range(40)]
NAMES = pd.Series([f"brown:{row // 2:02d}" for row in range(40)], index=range(100, 140))


def _moments(model: nn.Module, documents: Any) -> list:
    found = moments_of(model, TEXTS, ["resid_pre.0"], documents=documents, progress=False)
    return [sorted(found.documents)]


def _activations(model: nn.Module, documents: Any) -> list:
    kept = capture(model, TEXTS, ["resid_pre.0"], positions="all", progress=False)
    return [sorted(moments_of_activations(kept, documents=documents, progress=False).documents)]


def _tuned(model: nn.Module, documents: Any) -> list:
    return [fit_tuned_lens(model, TEXTS, documents=documents, settings=TunedSettings(steps=1)).weight]


def _ridge(model: nn.Module, documents: Any) -> list:
    return [map_.weight for map_ in ridge_to_last(model, TEXTS, documents=documents, depths=[1]).values()]


def _attention(model: nn.Module, documents: Any) -> list:
    return [train_attention_lens(model, TEXTS, 1, documents=documents, steps=1, batch_rows=32).lens.weight]


READERS: dict[str, Callable[[nn.Module, Any], list]] = {
    "lens_statistics": lambda model, documents: [
        lens_statistics(model, TEXTS, logit_lens_of(model), documents=documents)["logit"].document
    ],
    "logit_lens": lambda model, documents: [logit_lens(model, TEXTS, documents=documents).document],
    "lens_rows": lambda model, documents: [lens_rows(model, TEXTS, 1, documents=documents).document],
    "train_attention_lens": _attention,
    "moments_of": _moments,
    "moments_of_activations": _activations,
    "fit_tuned_lens": _tuned,
    "ridge_to_last": _ridge,
}


@pytest.mark.parametrize("name", READERS)
def test_names_are_as_good_as_their_numbers(tiny, name):
    model = tiny("llama")
    named, numbered = (READERS[name](model, given) for given in (NAMES, document_numbers(NAMES, 40).tolist()))
    for one, other in zip(named, numbered, strict=True):
        assert len(one) > 0
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=0)
