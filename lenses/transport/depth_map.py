"""Which depth of one model is which depth of another: best match of each layer, and the best path that never goes back.

    depths = depth_map(alignment(moments, "shallow", "deep"))
    depths.table                      # per layer of the shallow model: best layer, how far the next is, the path
    depths.summary                    # is the best match monotone; what a monotone or a proportional path loses

Two questions, with two answers where the models differ:

    predicts        the layer of the deeper model that this one says most of: argmax_j R2(i -> j).  Its targets differ,
                    and one that is easy for every layer wins for all
    predicted by    the layer of the deeper model that says most of this one: argmax_j R2(j -> i), one target throughout

A monotone path j(0) <= j(1) <= ... maximises sum_i R2 by dynamic programming. Where the best match is monotone, it is
that path; where layers are nearly alike the choice among them is noise, which `close` and the path's loss show. The
proportional path j = i L'/L is the hypothesis that a deeper model is the shallower one stretched.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from microtome.lenses.short_repr import short_repr
from microtome.lenses.transport.alignment import Alignment

DIRECTIONS = ("predicts", "predicted by")


@dataclass(frozen=True, eq=False)
class DepthMap:
    """Depths of a model in those of another.

    Attributes:
        table: one row per direction and site of the shallower model: direction, site, depth (0 to 1), best (site of
            the deeper one), best_depth, score, margin (to the runner-up), close (how many sites are within the
            tolerance of the best, itself included), close_from and close_to (the first and last of these), path (its
            site on the monotone path), path_depth, path_score.
        summary: one row per direction: is_monotone (the best match never goes back), matched (how many sites are the
            best match of some site; one that is best for all makes a path that says nothing), score, path_score and
            proportional_score (means over sites), distance (mean |best_depth - depth|), path_distance.
        value: the alignment's column that was compared.
        tolerance: of `close`, in its units.
    """

    table: pd.DataFrame
    summary: pd.DataFrame
    value: str
    tolerance: float

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per direction and site."""
        return self.table


def depth_map(found: Alignment, value: str = "r2_vw", *, tolerance: int | float = 0.01) -> DepthMap:
    """Match every source of an alignment with its targets; `found.reversed()` for every target.

    Args:
        found: sites of both models in order of depth; relative depth is the place among them, 0 to 1.
        value: a column, such as "r2_vw", "r2_wh", "beyond_r2_vw" (read from back_r2_vw, beyond_back_r2_vw in the other
            direction), or a symmetric one: "cka", "cka_two", "canonical".
        tolerance: sites within it of the best count as close.

    Raises:
        KeyError: no such column.
        ValueError: a value that is missing (NaN), or a negative tolerance.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; give 0 or more, in units of {value}.")
    tables, summaries = [], []
    for direction, column in zip(DIRECTIONS, (value, _back(found, value)), strict=True):
        scores = found.matrix(column).to_numpy(dtype=float)
        if not np.isfinite(scores).all():
            raise ValueError(f"{column} is missing for some pairs (NaN). Draw a depth map of a column that is there.")
        table, summary = _matched(found, scores, float(tolerance))
        tables.append(table.assign(direction=direction)[["direction", *table.columns]])
        summaries.append({"direction": direction, **summary})
    return DepthMap(pd.concat(tables, ignore_index=True), pd.DataFrame(summaries), value, float(tolerance))


def monotone_path(scores: Float[np.ndarray, "source target"]) -> Int[np.ndarray, " source"]:
    """j(i), never smaller than j(i - 1), of the largest sum of scores[i, j(i)]; the smaller j where two are alike."""
    best, steps = scores[0].astype(float), []
    for row in scores[1:]:
        steps.append([int(best[: j + 1].argmax()) for j in range(len(best))])
        best = best[steps[-1]] + row
    path = [int(best.argmax())]
    for step in reversed(steps):
        path.append(step[path[-1]])
    return np.array(path[::-1])


def _back(found: Alignment, value: str) -> str:
    """The same in the other direction; a symmetric value is its own."""
    for lead in ("beyond_", "lexical_", "shuffled_", ""):
        if value.startswith(lead):
            back = f"{lead}back_{value.removeprefix(lead)}"
            return back if back in found.table.columns else value
    return value


def _matched(found: Alignment, scores: np.ndarray, tolerance: float) -> tuple[pd.DataFrame, dict[str, object]]:
    targets = np.array(found.targets)
    rows, columns = scores.shape
    depth, target_depth = (np.arange(n) / max(n - 1, 1) for n in (rows, columns))
    best, path = scores.argmax(1), monotone_path(scores)
    top = scores[np.arange(rows), best]
    on_path = scores[np.arange(rows), path]
    proportional = scores[np.arange(rows), np.floor(depth * (columns - 1) + 0.5).astype(int)]
    is_close = scores >= top[:, None] - tolerance
    table = pd.DataFrame(
        {
            "site": found.sources,
            "depth": depth,
            "best": targets[best],
            "best_depth": target_depth[best],
            "score": top,
            "margin": top - np.sort(scores, 1)[:, -2] if columns > 1 else np.nan,
            "close": is_close.sum(1),
            "close_from": targets[is_close.argmax(1)],
            "close_to": targets[columns - 1 - is_close[:, ::-1].argmax(1)],
            "path": targets[path],
            "path_depth": target_depth[path],
            "path_score": on_path,
        }
    )
    summary = {
        "is_monotone": bool((np.diff(best) >= 0).all()),
        "matched": len(set(best.tolist())),
        "score": top.mean(),
        "path_score": on_path.mean(),
        "proportional_score": proportional.mean(),
        "distance": np.abs(target_depth[best] - depth).mean(),
        "path_distance": np.abs(target_depth[path] - depth).mean(),
    }
    return table, summary
