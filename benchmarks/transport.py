"""Transport between all 465 forward pairs of SmolLM2's 31 residual depths over 20,000 tokens, from moments.

Claims:
1. the pass that takes the moments of all pairs, in three shards by document, is at most 3 x the bare forward pass of
   the same batches (the model without its head, all 30 blocks, nothing read), paired in one process;
2. 25 strengths, ceilings and efficiency of every rank, and subspace sizes of all 465 pairs take under 240 s;
3. a process that does both, model included, stays under 6.5 GB resident;
4. for comparison, the per-pair route as published: activations in memory, GridSearchCV(Ridge) over 8 alphas in 5 folds
   and a fit, timed on a sample of pairs and scaled up.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch
from ledger import paired, record, timed
from ridge_pairs import rows_of, sample_of
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV

from microtome.capture.models import LoadedModel, load_model
from microtome.data.plain_english import plain_english
from microtome.lenses.corpus_pass import corpus_pass
from microtome.lenses.moments import Moments
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.token_windows import TokenWindows, token_windows
from microtome.lenses.transport.transport_map import transport_map

PUBLISHED_ALPHAS = (0.1, 1, 10, 100, 1e3, 2e3, 5e3, 1e4)


def windows_of(model: LoadedModel, tokens: int) -> TokenWindows:
    """Windows of 256 tokens, about so many tokens in all."""
    table = plain_english(characters=5 * tokens)
    found = token_windows(model, table["text"], documents=table["document"].astype("category").cat.codes)
    kept = int(np.searchsorted(np.cumsum([len(text) for text in found.texts]), tokens)) + 1
    return TokenWindows(found.texts[:kept], found.documents[:kept], found.starts[:kept], found.tokens, found.left_out)


def bare_pass(model: LoadedModel, windows: TokenWindows) -> Callable[[], None]:
    """The forwards of the same batches, head left out."""
    job = corpus_pass(model, windows.texts, ["resid_post.29"])
    body = model.module.get_decoder() if hasattr(model.module, "get_decoder") else model.module.model

    def run() -> None:
        with torch.no_grad():
            for texts in job.batches:
                width = max(job.texts[i].length for i in texts)
                ids = torch.zeros(len(texts), width, dtype=torch.int64)
                mask = torch.zeros_like(ids)
                for row, i in enumerate(texts):
                    ids[row, : job.texts[i].length] = torch.as_tensor(windows.texts[i])
                    mask[row, : job.texts[i].length] = 1
                body(input_ids=ids, attention_mask=mask, use_cache=False)

    return run


def moments(model: LoadedModel, windows: TokenWindows) -> Moments:
    """All pairs of depths, three shards."""
    return moments_of(model, windows.texts, "resid", documents=windows.documents, progress=False)


def whole(tokens: int) -> None:
    """Both steps in this process; prints seconds and the peak of resident memory."""
    model = load_model("smollm2")
    held = moments(model, windows_of(model, tokens))
    answers = {}
    seconds = timed(lambda: answers.update(found=transport_map(held)))
    table = answers["found"].table
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    counts = {shard: held.count(shard) for shard in held.shards}
    edges = int((table["edge"] != "").sum())
    print(json.dumps({"seconds": seconds, "pairs": len(table), "peak": peak, "counts": counts, "edges": edges}))


def per_pair(x: np.ndarray, y: np.ndarray, is_test: np.ndarray) -> float:
    """R2, mean of channels, of the published estimator on the test rows."""
    search = GridSearchCV(Ridge(), {"alpha": PUBLISHED_ALPHAS}, cv=5, scoring="r2").fit(x[~is_test], y[~is_test])
    return float(r2_score(y[is_test], search.predict(x[is_test])))


def main() -> None:
    """Run the claims."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs, each in turn first")
    parser.add_argument("--sample", type=int, default=2, help="pairs of sites that the per-pair route is timed on")
    parser.add_argument("--whole", action="store_true", help="both steps once, in this process")
    options = parser.parse_args()
    if options.whole:
        return whole(options.tokens)
    said = subprocess.run(
        [sys.executable, __file__, "--whole", "--tokens", str(options.tokens)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(said.stdout.splitlines()[-1])
    about = f"SmolLM2, {sum(found['counts'].values()):,} tokens ({found['counts']}), width 576"
    record(
        "transport: 25 strengths, ceilings of every rank and sizes of all forward pairs from moments, seconds",
        found["seconds"],
        "< 240",
        found["seconds"] < 240 and found["pairs"] == 465,
        "none: the seconds themselves",
        f"{about}; {found['pairs']} pairs, {found['edges']} at the edge of the grid; {torch.get_num_threads()} threads",
    )
    record(
        "transport: peak resident memory of a process that takes moments of all pairs and solves them, GB",
        found["peak"] / 1e9,
        "< 6.5",
        found["peak"] < 6.5e9,
        "none: getrusage's maximum, model and libraries included",
        about,
    )
    model = load_model("smollm2")
    windows = windows_of(model, options.tokens)
    bare = bare_pass(model, windows)
    ratio, ratios = paired(lambda: moments(model, windows), bare, options.pairs)
    record(
        "transport: moments of all pairs of 31 depths over the bare forward pass, forward included",
        ratio,
        "<= 3",
        ratio <= 3,
        "the same batches through the model without its head, nothing read",
        f"{about}; ratios {ratios}; {torch.get_num_threads()} threads",
    )
    held = moments(model, windows)
    sample = sample_of([str(site) for site in held.sites], options.sample)
    values, is_test = rows_of(model, windows, held, sorted({site for pair in sample for site in pair}))
    scores: list[float] = []
    seconds = [
        timed(lambda pair=pair: scores.append(per_pair(values[pair[0]], values[pair[1]], is_test))) for pair in sample
    ]
    own = [float(transport_map(held, [pair]).table["r2_ua"].iloc[0]) for pair in sample]
    lines = [
        f"{source} to {target}: {taken:.0f} s, R2 {theirs:.4f} (ours {ours:.4f})"
        for (source, target), taken, theirs, ours in zip(sample, seconds, scores, own, strict=True)
    ]
    record(
        "transport: the per-pair route (8 alphas, 5 folds, one refit; no ceilings) over ours, all 465 pairs",
        float(np.mean(seconds)) * 465 / found["seconds"],
        "none",
        None,
        "GridSearchCV(Ridge) on rows in memory, mean of a sample scaled up",
        f"{about}; {'; '.join(lines)}",
    )


if __name__ == "__main__":
    main()
