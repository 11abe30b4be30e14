"""One training step of an attention lens of a layer: the small form against the original form batched over heads.

Claims: the small form has exactly d_model / d_head (9 on SmolLM2) times fewer parameters, and a step takes at least
3 x less time, last positions only, on the same rows with the same optimiser, at equal loss.

A step is what training does: the teacher's distribution, what the form reads, KL and gradient, AdamW (torch's fused
one). The original form is one product over all heads, [rows, heads x d_model] by [heads x d_model, vocab]. The loss is
compared at one point, the original's weights being those of the small form through each head's pseudo-inverse. AdamW
moves every weight by its rate, and the original form reads more numbers, so the small form's rate is larger by the
ratio of what they read (sum |o| / sum |v|, 13.5 here): a first step then moves the logits alike, and the losses after
the timed steps are printed. Weights, gradient and Adam's two
moments take 4.1 GB for the original form. --vocab cuts the vocabulary, for a machine without that.
"""

import argparse
from collections.abc import Callable

import torch
from ledger import paired, record
from torch import Tensor, nn

from microtome.capture import load_model
from microtome.lenses.attention_lens_loss import readout_kl
from microtome.lenses.attention_lens_readout import readout_input
from microtome.lenses.attention_lens_rows import LensRows, lens_rows
from microtome.lenses.attention_lens_start import folded_unembedding, plain_bias, plain_weight
from microtome.lenses.head_writes import head_maps
from microtome.lenses.unembedding import Unembedding, unembedding_of

TEXTS = ("The capital of France is", "She opened the door and", "There was once a small", "Water boils when")
RATE = 1e-3
TOLERANCE = 1e-3  # nats, of a loss of some 10


def stepper(
    form: str, weight: Tensor, bias: Tensor, rows: LensRows, writes: Tensor, end: Unembedding, rate: float
) -> Callable[[], float]:
    """One training step on these rows; returns the loss before it."""
    parameters = nn.Parameter(weight), nn.Parameter(bias)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)

    def step() -> float:
        for parameter in parameters:
            parameter.grad.zero_()
        read = readout_input(rows.mixed, writes, "joint", form)
        values = [parameter.detach() for parameter in parameters]
        gradients = {"weight_gradient": parameters[0].grad, "bias_gradient": parameters[1].grad}
        kl = readout_kl(read, *values, rows.normed, end, **gradients)
        optimiser.step()
        return float(kl.mean())

    return step


def main() -> None:
    """Run the claims."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", type=int, default=14)
    parser.add_argument("--rows", type=int, default=64, help="last positions per step")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=None, help="only the first tokens of the vocabulary")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model("smollm2")
    texts = [f"{TEXTS[i % len(TEXTS)]} {i}" for i in range(options.rows)]
    rows = lens_rows(model, texts, options.layer, positions="last")
    end = unembedding_of(model)
    cut = slice(options.vocab)
    end = Unembedding(end.norm, end.weight[cut], None if end.bias is None else end.bias[cut], end.factor, end.cap)
    writes, attention_bias = head_maps(model, options.layer)
    heads, d_head, d_model = writes.shape
    folded = folded_unembedding(end)
    # 0.05: the plain start lacks the norm's scale, and a loss of 20 nats would be compared less closely
    small_weight = 0.05 * plain_weight(writes, folded)
    constant = plain_bias(heads, attention_bias, folded)
    large_weight = (torch.linalg.pinv(writes) @ small_weight).reshape(1, heads * d_model, end.vocab)
    large_bias = torch.zeros(1, heads, end.vocab)
    large_bias[0] = constant / heads
    small_weight, small_bias = small_weight.reshape(1, heads * d_head, end.vocab), constant[None, None].clone()
    count = small_weight.numel() + small_bias.numel(), large_weight.numel() + large_bias.numel()
    reads = [float(readout_input(rows.mixed, writes, "joint", form).abs().sum()) for form in ("small", "original")]
    rates = RATE * reads[1] / reads[0], RATE
    small = stepper("small", small_weight, small_bias, rows, writes, end, rates[0])
    large = stepper("original", large_weight, large_bias, rows, writes, end, rates[1])
    start = small(), large()
    ratio, ratios = paired(large, small, options.pairs)
    later = small(), large()
    gap = abs(start[0] - start[1])
    shape = f"layer {options.layer}, {options.rows} last positions, vocabulary {end.vocab}"
    record(
        "attention lens: parameters of the original form / small form",
        count[1] / count[0],
        f"exactly {d_model / d_head:g}",
        count[1] * d_head == count[0] * d_model,
        "original form, one W_h [d_model, vocab] and b_h per head",
        f"{count[1]:,} / {count[0]:,}, {shape}",
    )
    record(
        "attention lens: time of a training step, original form / small form",
        ratio,
        f"at least 3, losses at one point within {TOLERANCE:g} nats",
        ratio >= 3 and gap <= TOLERANCE,
        "original form batched over heads by one product, same rows and AdamW",
        f"ratios {ratios}; loss at the start {start[0]:.5f} and {start[1]:.5f}, after {options.pairs + 2} steps "
        f"{later[0]:.4f} and {later[1]:.4f} (small, original; rates {rates[0]:.2g}, {rates[1]:g}); {shape}",
    )


if __name__ == "__main__":
    main()
