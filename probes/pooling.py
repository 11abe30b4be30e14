"""Rows per token to one row per text: the mean of the last tokens of each, the features of NL-ITI.

    pooled(text) = mean over the last n rows of the text, by position    (n = 1: the last token, as in ITI)

Beware: a text with fewer rows than n is the mean of those it has.
"""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor

from microtome.capture.activations import Activations


def pool_last(activations: Activations, tokens: int = 1) -> Activations:
    """One row per text, in order of first appearance: the mean of its last `tokens` rows, in float32.

    The row table keeps the entry of the last token; its position becomes -1 where several were averaged. Raises
    ValueError for fewer than one token, and for a text with two rows of one position.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens={tokens!r}; give how many of the last tokens to average, 1 for the last alone.")
    rows = activations.rows
    last = last_rows(rows, tokens)
    counts = torch.from_numpy((last >= 0).sum(1))
    chosen = torch.from_numpy(np.maximum(last, 0))
    is_row = torch.from_numpy(last >= 0)

    def pool(tensor: Tensor) -> Tensor:
        total = torch.zeros(len(last), *tensor.shape[1:], device=tensor.device)
        for column, present in zip(chosen.T.to(tensor.device), is_row.T.to(tensor.device), strict=True):
            total += torch.where(present.view(-1, *[1] * (tensor.dim() - 1)), tensor[column].float(), 0.0)
        return total / counts.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))

    kept = rows.iloc[last[:, 0]].reset_index(drop=True)
    kept["position"] = np.where(counts.numpy() > 1, -1, kept["position"])
    tensors = {site: pool(activations[site]) for site in activations.sites}
    return Activations(kept, tensors, {**activations.provenance, "pooled_last_tokens": tokens})


def last_rows(rows: pd.DataFrame, tokens: int) -> Int64[np.ndarray, "text token"]:
    """Row numbers of each text's last tokens, the last first; -1 where a text has no more."""
    text = pd.factorize(rows["text"])[0]
    position = rows["position"].to_numpy()
    order = np.lexsort((position, text))
    is_twice = (np.diff(text[order]) == 0) & (np.diff(position[order]) == 0)
    if is_twice.any():
        row = order[int(is_twice.argmax())]
        raise ValueError(
            f"Text {rows['text'].iloc[row]} has two rows of position {position[row]}, so which token is last is not "
            "known. Pass rows with one position each, or do not pool."
        )
    count = np.bincount(text)
    stop = count.cumsum()
    back = np.arange(min(tokens, int(count.max())))
    return np.where(back < count[:, None], order[np.maximum(stop[:, None] - 1 - back, 0)], -1).astype(np.int64)
