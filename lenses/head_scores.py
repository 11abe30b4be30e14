"""What each head does at each query, as sums and weights: for natural texts, and for texts with marked keys.

A is the pattern, t the position of the query, f the first token, T the number of keys (t + 1, or the text's length in a
bidirectional model). `_no_sink` is the same with the weight on f taken out and the rest scaled to one.

    previous   A[t, t-1]          self    A[t, t]         sink     A[t, f]          largest   max_s A[t, s]
    duplicate  weight on earlier equal tokens (f left out), over queries that have one
    induction_text  weight on tokens behind an earlier equal token, over queries that have one
    local_w    weight at distances below w;  local_w_over_uniform  over what equal weights on all keys would give
    entropy    -sum A log A / log T;         distance              sum A |t - s|
    output_norm     |z W_O| over the mean over the heads of the layer (before a norm behind the attention)

Beware: `no_sink` scores are ratios of sums (head_sums.py): a head that rests on the sink at most queries is judged by
the others. `output_norm` is NaN where the model does not offer `head_out`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from microtome.capture.output_weights import output_weights
from microtome.capture.sites import Site
from microtome.kernels.attention_statistics import KeyRule
from microtome.lenses.corpus_pass import CorpusPass
from microtome.lenses.head_pass import Scored, SeenCall, attention_sites
from microtome.lenses.head_texts import MarkedTexts


def natural_scores(
    plan: CorpusPass, *, windows: Sequence[int], first_query: int, is_written: bool = True
) -> Callable[[SeenCall], Scored]:
    """Scores of natural texts, over real queries at positions from `first_query` on.

    is_written: also the norm of what each head writes.
    """
    squares = _output_squares(plan) if is_written else {}

    def score(seen: SeenCall) -> Scored:
        t, real = seen.position, seen.is_real
        classes = seen.input_ids.masked_fill(~real | (t == 0), -1)
        before = seen.input_ids.roll(1, 1).masked_fill(~real | (t == 0), -1)
        queries = seen.input_ids.masked_fill(~real, -1)
        rules = [KeyRule(queries, classes), KeyRule(queries, before)]
        found = seen.call.statistics(windows=tuple(windows), rules=rules, first_key=seen.first_key)

        counts = (real & (t >= first_query))[:, None].to(found.total)
        place = t.clamp(min=0)[:, None].to(found.total)
        is_both_ways = _looks_ahead(found.on_self, found.total, real & (t == 0), real)
        keys = real.sum(1)[:, None, None].to(found.total).expand_as(place) if is_both_ways else place + 1
        rest = (found.total - found.on_first).clamp(min=0)
        first = found.on_first
        has_equal, has_target = (_has_key(queries, of)[:, None] * counts for of in (classes, before))
        log_keys = keys.log().clamp(min=1e-9)
        # sum over s != f of A log(A / (1 - A_f)), without a ratio of small numbers
        entropy_left = found.entropy + torch.xlogy(first, first) + torch.xlogy(rest, rest)

        scores: dict[str, tuple[Tensor, Tensor]] = {
            "previous": (found.on_previous, counts),
            "previous_no_sink": (found.on_previous, rest),
            "self": (found.on_self, counts),
            "self_no_sink": (found.on_self, rest),
            "sink": (first, counts),
            "largest": (found.largest, counts),
            "duplicate": (found.on_rules[0] * has_equal, has_equal),
            "duplicate_no_sink": (found.on_rules[0] * has_equal, rest * has_equal),
            "induction_text": (found.on_rules[1] * has_target, has_target),
            "induction_text_no_sink": (found.on_rules[1] * has_target, rest * has_target),
            "entropy": (found.entropy / log_keys, counts),
            "entropy_no_sink": (entropy_left / log_keys, rest),
            "distance": (found.mean_distance, counts),
            "distance_no_sink": (found.mean_distance - first * place, rest),
        }
        for number, window in enumerate(windows):
            near = found.within[number]
            uniform = _near_keys(place, keys, window)
            scores[f"local_{window}"] = (near, counts)
            scores[f"local_{window}_over_uniform"] = (near, counts * uniform / keys)
            scores[f"local_{window}_no_sink"] = (near - first * (place < window), rest)
        if seen.row in squares:
            z = seen.z.transpose(1, 2).float()
            norms = ((z @ squares[seen.row].to(z.device)) * z).sum(-1).clamp(min=0).sqrt()
            scores["output_norm"] = (norms, norms.mean(1, keepdim=True).expand_as(norms))
        elif is_written:
            scores["output_norm"] = (first * 0, counts * 0)
        return _counted(scores, counts, first)

    return score


def _counted(scores: Scored, counts: Tensor, like: Tensor) -> Scored:
    """Sums and weights where queries count; what padding holds, NaN included, is no part of them."""
    counted = counts.expand_as(like) > 0
    return {
        name: tuple(torch.where(counted, (part * counts).expand_as(like), 0) for part in parts)
        for name, parts in scores.items()
    }


def marked_scores(made: MarkedTexts, name: str) -> Callable[[SeenCall], Scored]:
    """Scores at the queries of made texts: weight on the marked keys, `_copied` on the first one alone, and `_top`,
    how often no key has more weight than that one."""

    def score(seen: SeenCall) -> Scored:
        batch, length = seen.input_ids.shape
        marked = torch.full((batch, length, made.targets.shape[1]), -1, device=seen.input_ids.device)
        queries, targets = (torch.as_tensor(x, device=marked.device) for x in (made.queries, made.targets))
        marked[:, queries] = targets.expand(batch, -1, -1)
        counts = torch.zeros(batch, 1, length, device=marked.device)
        counts[..., queries] = 1
        found = seen.call.statistics(marked=marked, first_key=seen.first_key)
        on_all, on_one = found.on_marked.sum(-1), found.on_marked[..., 0]
        rest = (found.total - found.on_first).clamp(min=0)
        scores = {
            name: (on_all, counts),
            f"{name}_no_sink": (on_all, rest),
            f"{name}_top": ((on_one >= found.largest * (1 - 1e-5)).to(on_one), counts),
        }
        if made.targets.shape[1] > 1:
            scores[f"{name}_copied"] = (on_one, counts)
        return _counted(scores, counts, on_one)

    return score


def _output_squares(plan: CorpusPass) -> Mapping[int, Tensor]:
    """W_O W_O^T of each head by layer, `[head, d_head, d_head]`: a head's written norm from z, without the write."""
    found = {}
    for row, site in enumerate(attention_sites(plan)):
        written = Site("head_out", site.layer, stack=site.stack, call=site.call)
        if written in plan.anatomy.taps and not site.stack:
            weights = output_weights(plan.module, layers=site.layer, anatomy=plan.anatomy)
            weight = weights[replace(written, kind="z")].float()
            found[row] = weight @ weight.transpose(1, 2)
    return found


def _looks_ahead(on_self: Tensor, total: Tensor, is_first: Tensor, real: Tensor) -> bool:
    """Whether the first token of a text of several gives weight to others: the model is then bidirectional."""
    more = (is_first & (real.sum(1) > 1)[:, None])[:, None]
    return bool((((total - on_self) > 1e-6) & more).any())


def _has_key(queries: Tensor, keys: Tensor) -> Tensor:
    """Where a query has an earlier key of its class: its class's first key comes before it."""
    batch, length = queries.shape
    where = torch.arange(length, device=queries.device).expand(batch, -1)
    top = int(max(queries.max(), keys.max(), 0)) + 1
    first = torch.full((batch, top), length, device=queries.device)
    first.scatter_reduce_(1, keys.clamp(min=0), where.masked_fill(keys < 0, length), "amin")
    earliest = first.gather(1, queries.clamp(min=0))
    return ((earliest < where) & (queries >= 0)).float()


def _near_keys(place: Tensor, keys: Tensor, window: int) -> Tensor:
    """How many keys lie at a distance below the window, of the keys that a query sees."""
    behind = place.clamp(max=window - 1)
    ahead = (keys - 1 - place).clamp(min=0, max=window - 1)
    return behind + 1 + ahead
