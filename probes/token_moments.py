"""First and second moments over the tokens of a text: what a probe of the mean cannot see.

    features = [mean; vech(P S P')],  mean = sum_t x_t / n,  S = sum_t (x_t - mean)(x_t - mean)' / n

P has r orthonormal rows, so that r = 32 gives r (r + 1) / 2 = 528 columns beside the mean; with `signed_sqrt` each
entry c becomes sign(c) sqrt(|c|), which tames products of large coordinates. After moment probing (Gao et al. 2023),
whose vision head takes cross-covariances of learned projections; this form is ours. P is random and fixed by `seed`, so
that nothing is learned, or PCA of the training tokens, which belongs into the fold:

    tokens = tokens_by_text(acts, "resid_post.12")  # one array [token, d] per text
    probe = make_pipeline(TokenMoments(projection="pca"), LogisticProbe())
    cross_val_score(probe, tokens, y, cv=GroupKFold(), groups=groups)

`token_moments(acts)` makes activations of all sites for `sweep`, by the random projection. Beware: a text of n tokens
has a covariance of rank n - 1 at most, zero for one token, so that short texts give noise and the features tell lengths
apart (column `n_tokens` is there to test that); a layer norm before the site removes part of the second moment.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from microtome.capture.activations import Activations, SiteName
from microtome.capture.sites import Site
from microtome.capture.stored_tensor import in_memory

WIDTH = 32
_VALUES_AT_ONCE = 2**22  # float64 entries of tokens and of outer products, 32 MB each


class TokenMoments(TransformerMixin, BaseEstimator):
    """Texts of tokens to one row of features each.

    X is a sequence of arrays `[token, feature]`, one per text. An array `[row, feature]` counts as texts of one token
    each, whose covariances are zero.

    Parameters: width, rows of P, all features if there are fewer; projection, "random" (learns nothing) or "pca" (the
    leading directions of the training tokens about their mean); signed_sqrt, whether entries of the covariance become
    sign(c) sqrt(|c|); with_mean, whether the mean is among the features; seed, of the random projection.

    Attributes: components_ `[r, feature]`, the rows of P; n_features_in_.
    """

    def __init__(self, width=WIDTH, *, projection="random", signed_sqrt=True, with_mean=True, seed=0):
        self.width = width
        self.projection = projection
        self.signed_sqrt = signed_sqrt
        self.with_mean = with_mean
        self.seed = seed

    def fit(self, X: Any, y: Any = None) -> "TokenMoments":
        """Draw P, or learn it from the tokens of these texts; labels are not used.

        Raises ValueError for an unknown projection, a width below 1, NaN, texts without tokens or of another width.
        """
        tokens, _ = self._tokens(X, reset=True)
        if self.projection not in ("random", "pca"):
            raise ValueError(f"projection={self.projection!r}: expected 'random' or 'pca'.")
        if not isinstance(self.width, Integral) or self.width < 1:
            raise ValueError(f"width={self.width!r}: give a whole number of directions, at least 1.")
        n_features = tokens.shape[1]
        if self.projection == "random":
            self.components_ = random_projection(n_features, int(self.width), seed=self.seed).numpy()
        else:
            centred = tokens - tokens.mean(0)
            _, vectors = np.linalg.eigh(centred.T @ centred)
            leading = vectors[:, ::-1][:, : int(self.width)]
            largest = np.abs(leading).argmax(0)  # eigenvectors have no sign of their own
            self.components_ = (leading * np.sign(leading[largest, np.arange(leading.shape[1])])).T.copy()
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Features `[text, feature]`, float64."""
        check_is_fitted(self)
        tokens, owner = self._tokens(X, reset=False)
        moments = moments_by_text(
            torch.from_numpy(tokens)[None],
            torch.from_numpy(owner),
            torch.from_numpy(self.components_),
            signed_sqrt=bool(self.signed_sqrt),
            with_mean=bool(self.with_mean),
        )
        return moments[0].numpy()

    def _tokens(self, X: Any, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        """All tokens, float64, and the number of the text of each."""
        if not _is_texts(X):
            tokens = np.array(validate_data(self, X, dtype=np.float64, reset=reset))
            return tokens, np.arange(len(tokens))
        texts = [np.asarray(text) for text in X]
        if wrong := [n for n, text in enumerate(texts) if text.ndim != 2 or not len(text)]:
            raise ValueError(
                f"text {wrong[0]} has shape {list(texts[wrong[0]].shape)}; expected [token, feature], a token or more."
            )
        if wrong := [n for n, text in enumerate(texts) if text.shape[1] != texts[0].shape[1]]:
            raise ValueError(f"text {wrong[0]} has {texts[wrong[0]].shape[1]} features, text 0 {texts[0].shape[1]}.")
        tokens = validate_data(self, np.concatenate(texts), dtype=np.float64, reset=reset)
        return tokens, np.repeat(np.arange(len(texts)), [len(text) for text in texts])


def _is_texts(X: Any) -> bool:
    """Whether X is a sequence of matrices."""
    is_sequence = isinstance(X, Sequence) or (isinstance(X, np.ndarray) and X.dtype == object)
    return is_sequence and len(X) > 0 and isinstance(X[0], np.ndarray | Tensor) and X[0].ndim == 2


def random_projection(n_features: int, width: int, *, seed: int = 0) -> Float[Tensor, "direction feature"]:
    """Orthonormal rows, uniform over subspaces: the Q of a Gaussian matrix; at most as many as features, float64."""
    gaussian = np.random.default_rng(seed).normal(size=(n_features, min(width, n_features)))
    q, r = np.linalg.qr(gaussian)
    return torch.from_numpy((q * np.sign(np.diag(r))).T.copy())


def moments_by_text(
    tokens: Float[Tensor, "site token feature"],
    owner: Int64[Tensor, " token"],
    components: Float[Tensor, "direction feature"],
    *,
    signed_sqrt: bool = True,
    with_mean: bool = True,
) -> Float[Tensor, "site text moment"]:
    """`[mean; vech(P S P')]` of every text and site, float64; vech runs along rows of the upper triangle.

    Args:
        owner: number of the text of each token, 0, 1, ...; every number occurs.
    """
    n_sites, n_tokens, n_features = tokens.shape
    components = components.double()
    counts = torch.bincount(owner).double()
    first, second = torch.triu_indices(len(components), len(components))
    step = max(1, _VALUES_AT_ONCE // (n_sites * max(n_features, len(first))))
    chunks = [slice(start, start + step) for start in range(0, n_tokens, step)]
    mean = torch.zeros(n_sites, len(counts), n_features, dtype=torch.float64)
    for chunk in chunks:
        mean.index_add_(1, owner[chunk], tokens[:, chunk].double())
    mean /= counts[:, None]
    centre = mean @ components.T
    covariance = torch.zeros(n_sites, len(counts), len(first), dtype=torch.float64)
    for chunk in chunks:
        part = tokens[:, chunk].double() @ components.T - centre[:, owner[chunk]]
        covariance.index_add_(1, owner[chunk], part[..., first] * part[..., second])
    covariance /= counts[:, None]
    if signed_sqrt:
        covariance = covariance.sign() * covariance.abs().sqrt()
    return torch.cat([mean, covariance], dim=2) if with_mean else covariance


def token_moments(
    activations: Activations,
    *,
    sites: Sequence[SiteName] | None = None,
    width: int = WIDTH,
    signed_sqrt: bool = True,
    with_mean: bool = True,
    seed: int = 0,
) -> Activations:
    """Moments of every site, one row per text, by a fixed random projection: nothing is learned.

    Args:
        activations: of all tokens: `capture(..., positions="all")`, or a span's.
        sites, width, signed_sqrt, with_mean, seed: as for `TokenMoments`; all sites if None.

    Returns:
        Sites of the same names, `[text, moment]` or `[text, head, moment]`, float32; rows in the order of the texts'
        first tokens, with the columns that are the same at all tokens of every text, and `n_tokens`.

    Raises:
        ValueError: one row per text, where covariances are zero, or a width below 1.
        KeyError: a site that was not captured.
    """
    if width < 1:
        raise ValueError(f"width={width}: give at least 1 direction.")
    chosen = activations if sites is None else activations.only(sites)
    rows = chosen.rows
    owner, texts = pd.factorize(rows["text"])
    if len(texts) == len(rows):
        raise ValueError(
            f"every one of {len(rows)} texts has one row, so no covariance. Capture positions='all', or a span of "
            "several tokens."
        )
    which = torch.from_numpy(owner.astype(np.int64))
    tensors: dict[Site, Tensor] = {}
    for site in chosen.sites:
        values = in_memory(chosen.tensors[site]).detach().cpu()
        by_site = values.transpose(0, 1) if values.dim() == 3 else values[None]
        components = random_projection(values.shape[-1], width, seed=seed)
        moments = moments_by_text(by_site, which, components, signed_sqrt=signed_sqrt, with_mean=with_mean).float()
        tensors[site] = moments.transpose(0, 1).contiguous() if values.dim() == 3 else moments[0]
    made = {"width": width, "signed_sqrt": signed_sqrt, "with_mean": with_mean, "seed": seed}
    return Activations(_text_rows(rows, owner), tensors, {**chosen.provenance, "token_moments": made})


def _text_rows(rows: pd.DataFrame, owner: np.ndarray) -> pd.DataFrame:
    """One row per text: what is the same at all its tokens."""
    first = pd.Series(owner).drop_duplicates().index.to_numpy()
    columns = {}
    for name in rows:
        codes = pd.factorize(rows[name], use_na_sentinel=False)[0]
        if name in ("text", "position", "token") or (codes == codes[first][owner]).all():
            columns[name] = rows[name].iloc[first].reset_index(drop=True)
    table = pd.DataFrame(columns)
    empty = pd.Series("", index=table.index, dtype="str")
    return table.assign(position=-1, token=empty, n_tokens=np.bincount(owner))


def tokens_by_text(activations: Activations, site: SiteName) -> list[Float[np.ndarray, "token feature"]]:
    """The token rows of a site, one array per text in the order of their first tokens: what `TokenMoments` takes.

    Raises:
        KeyError: a site that was not captured.
        ValueError: several heads; name one, as in "z.5.3".
    """
    values = activations[site].detach().cpu()
    if values.dim() != 2:
        raise ValueError(f"{site} has shape {list(values.shape)}. Name one head, such as 'z.5.3'.")
    owner, texts = pd.factorize(activations.rows["text"])
    return [values[np.flatnonzero(owner == text)].numpy() for text in range(len(texts))]
