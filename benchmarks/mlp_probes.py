"""Two-layer networks of all 270 heads of SmolLM2-135M's shape beside a loop of single trainings.

Claim: `fit_mlps` at least 10 x faster than one `torch.nn.Sequential` after the other, trained with
`torch.optim.Adam` in the ordinary way, at equal final loss. Both sides: the settings of sheet section 8 (64 -> 16 -> 1,
Adam, learning rate 5e-4, decay 1e-4, batch 32, last batch dropped, 10 epochs), float32, the same standardised rows,
start values and batches, all threads.

The loop trains a sample of the heads; its time is scaled to all of them. Its operations are so small that two threads
slow it down, on a busy machine many times: it runs with all threads and with one, and the faster of the two counts.
Sides run in turn; the ratio is the median.
The rows are random with a planted label: what is in them does not change the time of a step.
"""

import argparse
import os
import time
from statistics import median

import torch
from ledger import record
from torch import nn

from microtome.probes.mlp_fits import MlpFits, fit_mlps
from microtome.probes.mlp_networks import MlpSettings, start_values

HEADS, WIDTH = 270, 64
SETTINGS = MlpSettings()


def planted(n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of every head, and a label that part of them carry."""
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(n_rows, generator=generator) > 0.5
    features = torch.randn(HEADS, n_rows, WIDTH, generator=generator)
    features += torch.linspace(0, 0.1, HEADS)[:, None, None] * (2.0 * positive[:, None] - 1)
    return features, positive


def ours(features: torch.Tensor, positive: torch.Tensor) -> MlpFits:
    """All heads in one call."""
    return fit_mlps(features, positive[None], torch.ones(1, len(positive), dtype=torch.bool), settings=SETTINGS)


def one_by_one(features: torch.Tensor, positive: torch.Tensor) -> list[nn.Sequential]:
    """The ordinary loop, head after head, standardised as ours."""
    target = positive.float()
    networks = []
    loss_of = nn.BCEWithLogitsLoss()
    for rows in features:
        rows = (rows - rows.mean(0)) / rows.std(0, correction=0)
        network = nn.Sequential(nn.Linear(WIDTH, SETTINGS.hidden[0]), nn.ReLU(), nn.Linear(SETTINGS.hidden[0], 1))
        weights, biases = start_values((WIDTH, *SETTINGS.hidden, 1), 0)
        for layer, weight, bias in zip(network[::2], weights, biases, strict=True):
            layer.weight.data.copy_(weight.T)
            layer.bias.data.copy_(bias)
        adam = torch.optim.Adam(network.parameters(), lr=SETTINGS.learning_rate, weight_decay=SETTINGS.weight_decay)
        generator = torch.Generator().manual_seed(0)
        for _ in range(SETTINGS.epochs):
            order = torch.randperm(len(rows), generator=generator)
            for start in range(0, len(rows) - SETTINGS.batch + 1, SETTINGS.batch):
                batch = order[start : start + SETTINGS.batch]
                adam.zero_grad()
                loss_of(network(rows[batch])[:, 0], target[batch]).backward()
                adam.step()
        networks.append(network)
    return networks


def losses(fits: MlpFits, networks: list[nn.Sequential], features: torch.Tensor, positive: torch.Tensor) -> tuple:
    """Final training loss of each head in nats, both sides."""
    loss_of = nn.BCEWithLogitsLoss()
    target = positive.float()
    batched = [loss_of(logits[0, 0].float(), target).item() for logits in fits.logits(features)]
    with torch.no_grad():
        single = [
            loss_of(network((rows - rows.mean(0)) / rows.std(0, correction=0))[:, 0], target).item()
            for network, rows in zip(networks, features, strict=True)
        ]
    return torch.tensor(batched), torch.tensor(single)


def compare(n_rows: int, sample: int, pairs: int) -> None:
    """Record how many times faster one call is."""
    features, positive = planted(n_rows)
    some = torch.linspace(0, HEADS - 1, sample).round().long()
    ours(features[:8], positive), one_by_one(features[:1, :64], positive[:64])
    ratios, seconds = [], []
    for _ in range(pairs):
        started = time.perf_counter()
        fits = ours(features, positive)
        middle = time.perf_counter()
        networks = one_by_one(features[some], positive)
        threaded = (time.perf_counter() - middle) * HEADS / sample
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        middle_of_loops = time.perf_counter()
        one_by_one(features[some], positive)
        plain = (time.perf_counter() - middle_of_loops) * HEADS / sample
        torch.set_num_threads(threads)
        seconds.append((round(middle - started, 3), round(threaded, 2), round(plain, 2)))
        ratios.append(min(threaded, plain) / (middle - started))
    fits_of_some = ours(features[some], positive)
    batched, single = losses(fits_of_some, networks, features[some], positive)
    gap = (batched - single).abs().max().item()
    kept = (fits.weights[0][some] - fits_of_some.weights[0]).abs().max().item()
    record(
        f"MLP probes of {HEADS} heads, {n_rows} rows, times faster than one by one",
        median(ratios),
        ">= 10",
        bool(median(ratios) >= 10 and gap < 1e-4),
        f"nn.Sequential, BCEWithLogitsLoss, torch.optim.Adam head after head; {sample} of {HEADS} heads timed, scaled",
        f"{WIDTH} -> {SETTINGS.hidden[0]} -> 1, batch {SETTINGS.batch}, {SETTINGS.epochs} epochs, "
        f"{torch.get_num_threads()} threads both sides; pairs {[round(r, 1) for r in ratios]}; seconds ours, theirs "
        f"with all threads and with one (scaled) {seconds}; mean final loss {batched.mean():.6f} ours, "
        f"{single.mean():.6f} theirs, largest gap of a head {gap:.1e} nats; weights in the full call and in the "
        f"sample's differ by {kept:.0e}",
    )


def main() -> None:
    """Run the claim at two numbers of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--sample", type=int, default=10, help="heads that the loop trains")
    parser.add_argument("--pairs", type=int, default=3)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(os.cpu_count() or 1)
    for n_rows in options.rows:
        compare(n_rows, options.sample, options.pairs)


if __name__ == "__main__":
    main()
