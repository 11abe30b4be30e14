"""KL, cross-entropy, entropy, top 5 and rank of every depth, against a dense loop and against the products alone.

Claims, SmolLM2's 31 residual depths over 4,096 tokens of reviews: resident memory under 1 GB above the model (states of
all depths included); at least 1.6 x faster than a dense loop over depths in chunks of 256 tokens that computes the
final distribution once and shares it; at most 1.3 x the matrix products alone, same blocks. A second row times a
training step's `vocabulary_kl`, forward and backward, against the dense form under autograd.

The dense loop's answers are compared first: nats to 1e-4, ids and ranks counted. Its products are torch's (MKL on x86),
ours go through oneDNN where the processor has AVX-512; the products alone are timed both ways. Ours also gives what
the loop does not: the reverse KL, agreement, and the final state's own statistics.
"""

import argparse
import json
import subprocess
import sys
import threading
from pathlib import Path

import torch
from ledger import paired, record
from torch import Tensor

from microtome.capture import load_model
from microtome.data import sentiment
from microtome.kernels.vocabulary_statistics import BLOCK, ROWS, vocabulary_kl, vocabulary_statistics
from microtome.kernels.vocabulary_tiles import Rows, spans
from microtome.lenses.corpus_pass import corpus_pass
from microtome.lenses.unembedding import unembedding_of

CHUNK = 256


def resident_gb() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e9


class Peak:
    """The largest resident memory inside the block, looked at every 5 ms."""

    def __enter__(self) -> "Peak":
        self.start, self.gb, self._done = resident_gb(), resident_gb(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.gb = max(self.gb, resident_gb())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.gb = max(self.gb, resident_gb())

    @property
    def above(self) -> float:
        """Over what was resident at the start."""
        return self.gb - self.start


def lens_states(model: object, tokens: int) -> tuple[Tensor, Tensor]:
    """Normed states `[depth, token, d_model]` of the first tokens that have a successor, and these."""
    end = unembedding_of(model)
    texts = sentiment(per_domain=200)["text"].tolist()
    names = ["resid_pre.0", "resid_post"]
    plan = corpus_pass(model, texts, names, truncate="right", max_length=256)
    states = torch.empty(len(plan.sites), tokens, end.weight.shape[1])
    targets, row = torch.empty(tokens, dtype=torch.long), 0
    for chunk in plan.chunks():
        keep = chunk.has_target.nonzero()[: tokens - row, 0]
        for depth, site in enumerate(plan.sites):
            states[depth, row : row + len(keep)] = end.normed(chunk.values[site][keep])
        targets[row : row + len(keep)] = chunk.targets[keep]
        row += len(keep)
        if row == tokens:
            return states, targets
    raise SystemExit(f"{row} tokens of {tokens}")


@torch.no_grad()
def dense_loop(states: Tensor, targets: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The five statistics, depth after depth, the final distribution of a chunk computed once."""
    names = ("kl", "target_log_prob", "entropy", "top_ids", "target_rank")
    found = {name: [[] for _ in states] for name in names}
    for start, stop in spans(states.shape[1], CHUNK):
        p = (states[-1, start:stop] @ weight.T).log_softmax(-1)
        p_exp, target = p.exp(), targets[start:stop, None]
        for depth, hidden in enumerate(states[:, start:stop]):
            q = (hidden @ weight.T).log_softmax(-1)
            own = q.gather(-1, target)
            values = (
                (p_exp * (p - q)).sum(-1),
                own[:, 0],
                -(q.exp() * q).sum(-1),
                q.topk(5).indices,
                (q > own).sum(-1),
            )
            for name, value in zip(names, values, strict=True):
                found[name][depth].append(value)
    return {name: torch.stack([torch.cat(parts) for parts in by_depth]) for name, by_depth in found.items()}


@torch.no_grad()
def products(states: Tensor, weight: Tensor, plain: bool) -> None:
    """The products of all tiles and nothing else. plain: by torch.mm."""
    stacked = torch.cat([states[-1:], states])
    for start, stop in spans(states.shape[1], max(1, ROWS // len(stacked))):
        rows = Rows.of(stacked[:, start:stop].flatten(0, 1))
        if plain:
            rows = Rows(rows.dense, None, rows.count)
        for first, last in spans(len(weight), BLOCK):
            rows.times(weight[first:last])


def dense_step(states: Tensor, final: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the mean KL by autograd, depth after depth in chunks."""
    gradient = torch.empty_like(states)
    for start, stop in spans(states.shape[1], CHUNK):
        with torch.no_grad():
            p = (final[start:stop] @ weight.T).log_softmax(-1)
            p_exp = p.exp()
        for depth in range(len(states)):
            hidden = states[depth, start:stop].clone().requires_grad_()
            (p_exp * (p - (hidden @ weight.T).log_softmax(-1))).sum().backward()
            gradient[depth, start:stop] = hidden.grad
    return gradient


def our_step(states: Tensor, final: Tensor, weight: Tensor) -> Tensor:
    """The same, streamed."""
    hidden = states.clone().requires_grad_()
    vocabulary_kl(hidden, final, weight).sum().backward()
    return hidden.grad


def memory(tokens: int) -> None:
    """In a process of its own: GB above the model while states are read out and while statistics run."""
    model = load_model("smollm2")
    weight = unembedding_of(model).weight
    with Peak() as whole:
        states, targets = lens_states(model, tokens)
        with Peak() as statistics:
            vocabulary_statistics(states, weight, final=states[-1], targets=targets)
    print(json.dumps({"above_model": whole.above, "statistics": statistics.above}))


def main() -> None:
    """Run the claims."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure memory alone and print it (used by itself)")
    options = parser.parse_args()
    if options.memory:
        memory(options.tokens)
        return
    command = [sys.executable, __file__, "--memory", "--tokens", str(options.tokens)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = json.loads(child.stdout.splitlines()[-1])

    model = load_model("smollm2")
    weight = unembedding_of(model).weight
    states, targets = lens_states(model, options.tokens)
    depths, n = len(states), states.shape[1]

    def ours(count: int = n) -> object:
        return vocabulary_statistics(
            states[:, :count], weight, final=states[-1, :count], targets=targets[:count], top=5
        )

    few = min(CHUNK, n)
    found, expected = ours(few), dense_loop(states[:, :few], targets[:few], weight)
    gap = max(
        float((getattr(found, name) - expected[name]).abs().max()) for name in ("kl", "target_log_prob", "entropy")
    )
    same = {
        name: float((getattr(found, name) == expected[name]).double().mean()) for name in ("top_ids", "target_rank")
    }
    if gap > 1e-4 or min(same.values()) < 0.999:
        raise SystemExit(f"the two sides differ: {gap} nats, equal {same}")

    setting = (
        f"{depths} depths x {n} tokens, d_model {weight.shape[1]}, vocabulary {len(weight)}, float32, tiles {ROWS} x "
        f"{BLOCK}, {torch.get_num_threads()} threads; largest gap {gap:.1e} nats, equal ids and ranks {same}"
    )
    record(
        f"lens statistics of {depths} depths x {n} tokens: GB of resident memory above the model",
        peak["above_model"],
        "< 1",
        peak["above_model"] < 1,
        f"logits of all depths take {depths * n * len(weight) * 4 / 1e9:.1f} GB",
        f"states included; the statistics alone add {peak['statistics']:.3f} GB",
    )
    ratio, every = paired(lambda: dense_loop(states, targets, weight), ours, options.pairs)
    record(
        "lens statistics (KL, CE, entropy, top 5, rank): times faster than a dense loop over depths",
        ratio,
        ">= 1.6",
        ratio >= 1.6,
        f"chunks of {CHUNK} tokens, final distribution computed once and shared",
        f"{setting}; pairs {every}",
    )
    for plain in (False, True):
        ratio, every = paired(ours, lambda plain=plain: products(states, weight, plain), options.pairs)
        record(
            f"lens statistics over the products alone, {'torch.mm' if plain else 'the same products'}",
            ratio,
            "none" if plain else "<= 1.3",
            None if plain else ratio <= 1.3,
            "the products of the same tiles" + (", by torch.mm" if plain else ""),
            f"{setting}; pairs {every}",
        )

    part, final = states[::8, : min(1024, n)].contiguous(), states[-1, : min(1024, n)]
    one, other = our_step(part, final, weight), dense_step(part, final, weight)
    error = float((one - other).abs().max() / other.abs().max())
    ratio, every = paired(lambda: dense_step(part, final, weight), lambda: our_step(part, final, weight), options.pairs)
    record(
        "vocabulary_kl, forward and backward: times faster than dense autograd",
        ratio,
        "none",
        None,
        f"depth after depth in chunks of {CHUNK} tokens, final distribution shared",
        f"{len(part)} depths x {part.shape[1]} tokens; gradients differ by {error:.1e} of the largest; pairs {every}",
    )


if __name__ == "__main__":
    main()
