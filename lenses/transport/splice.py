"""An operator in place of the blocks between its sites: edits that write y_hat over the target while the model runs.

    r_target[j] <- x[i] U V + c     at the chosen tokens j;     i by the operator's route, x the source of this forward

`splice_edits` gives edits for `taps`, `next_token_kl` or `generate`. What lies between the sites still runs; only its
result is replaced. Beware: tokens before and behind the chosen ones keep their own keys and values in earlier blocks.

y_hat is computed in float32 where the model is of half precision, and written as a difference (an edit adds): zero is
written exactly, anything else to the rounding of the larger of y_hat and what was there.
"""

import threading
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from microtome.capture.anatomy import Anatomy
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit
from microtome.lenses.transport.operator import TransportOperator
from microtome.lenses.transport.routes import NO_SOURCE, source_columns

Transport = Callable[[Tensor], Tensor]


def splice_edits(
    operator: TransportOperator,
    at: Bool[Tensor, "batch token"] | str = "all",
    *,
    is_real: Bool[Tensor, "batch token"] | None = None,
    token_ids: Int[Tensor, "batch token"] | None = None,
    by: Transport | None = None,
    anatomy: Anatomy | None = None,
) -> Mapping[Site, Edit]:
    """Edits by site that splice the operator in.

    Args:
        at: tokens to write over, by row and column of the batch, padding included; "all", or "last" (the last column,
            as in left-padded generation).
        is_real: False at padding; all real if None. Routes need it where texts are padded.
        token_ids: of the batch, for a route by chance, whose draws hash them.
        by: what makes y_hat of x in place of the operator itself: a control (zero, mean, copy).
        anatomy: of the model, to refuse sites that it does not offer before anything runs.

    Raises:
        ValueError: another word for `at`, a route whose head comes after the target or one by chance without token
            ids, or a source that comes after the target (in the forward, where layers do not say it, as is a y_hat of
            another width than the target); one token at a time, as with a key-value cache, where a route needs earlier
            ones.
        KeyError, IndexError: a site the model does not offer.
    """
    if isinstance(at, str) and at not in ("all", "last"):
        raise ValueError(f"at is {at!r}; give 'all', 'last', or a mask [batch, token] of the tokens to write over.")
    source, target, head = Site.parse(operator.source), Site.parse(operator.target), operator.route.head
    if anatomy is not None:
        anatomy.expand(list(dict.fromkeys([source, target, *([head] if head is not None else [])])))
    if head is not None and target.layer is not None and _runs_after(head, target):
        raise ValueError(f"route {operator.route}: that head runs after {target} and cannot say what comes there.")
    if source.layer is not None and target.layer is not None and source.layer > target.layer:
        raise ValueError(f"{source} comes after {target} in a forward, so that nothing of it can be written there.")
    if operator.route.random is not None and token_ids is None:
        raise ValueError(f"route {operator.route} draws by the texts: give token_ids=, the ids of the batch.")
    held = threading.local()  # one forward's source; threads that share these edits do not share it
    make = operator if by is None else by

    def keep(value: Tensor) -> Tensor:
        held.source = value.detach().flatten(2)  # heads side by side, as in moments
        return torch.zeros_like(value)

    def keep_pattern(value: Tensor) -> Tensor:
        held.pattern = value.detach()
        return torch.zeros_like(value)

    def write(value: Tensor) -> Tensor:
        there = value.flatten(2)
        x = there if source == target else _taken(held, "source", f"{source} comes after {target} in this forward")
        real = torch.ones(value.shape[:2], dtype=torch.bool) if is_real is None else is_real
        real = real.to(value.device)
        chosen = _chosen(at, value, real)
        if not operator.route.is_same:
            if value.shape[1] == 1 and bool(chosen.any()):
                raise ValueError(
                    f"route {operator.route}: a forward of one token does not hold its source. Give the whole text to "
                    "every forward; in generation, use_cache=False."
                )
            late = f"the head of route {operator.route} comes after {target} in this forward"
            pattern = None if head is None else _taken(held, "pattern", late)
            ids = None if token_ids is None else token_ids.to(value.device)
            columns = source_columns(operator.route, real, pattern, ids)
            chosen = chosen & (columns != NO_SOURCE)
            x = x.gather(1, columns.clamp_min(0)[:, :, None].expand(-1, -1, x.shape[2]))
        x = x[chosen]
        written = make(x.to(torch.promote_types(x.dtype, torch.float32)))
        if written.shape[1] != there.shape[2]:
            raise ValueError(f"{written.shape[1]} channels were to be written at {target}, which has {there.shape[2]}.")
        delta = torch.zeros_like(there)
        delta[chosen] = written.to(there) - there[chosen]
        return delta.view_as(value)

    edits: dict[Site, Edit] = {}
    if source != target:
        edits[source] = Edit(keep)
    if head is not None:
        edits[head] = Edit(keep_pattern, queries="all")
    return edits | {target: Edit(write)}


def _runs_after(head: Site, target: Site) -> bool:
    """Whether a head's pattern is known only when the target has passed."""
    before = ("resid_pre", "q", "k", "v", "q_rot", "k_rot")  # of the same block; its other sites come after the pattern
    return head.layer > target.layer or (head.layer == target.layer and target.kind in before)


def _taken(held: threading.local, name: str, reason: str) -> Tensor:
    """What this forward left, which no later one may find."""
    if not hasattr(held, name):
        raise ValueError(f"{reason}: it cannot say what is written.")
    value = getattr(held, name)
    delattr(held, name)
    return value


def _chosen(at: Tensor | str, value: Tensor, real: Tensor) -> Tensor:
    if isinstance(at, Tensor):
        if at.shape != value.shape[:2]:
            raise ValueError(
                f"the mask of tokens is {tuple(at.shape)}, the batch {tuple(value.shape[:2])}: give one each."
            )
        return at.to(value.device) & real
    if at == "all":
        return real
    last = torch.zeros_like(real)
    last[:, -1] = True
    return last & real
