"""Attention and head statistics in one pass beside eager attention and the same statistics from its weights.

Claims: causal attention with z and all statistics, 2,048 tokens, one layer of SmolLM2's shape (9 query heads, 3
key-value heads of width 64), at least 2 x faster than transformers' eager attention plus the same statistics computed
densely from the weights that it returns; and memory that grows linearly with the length at 1,024 to 4,096 tokens.

Both sides: z, log-sum-exp or its stand-in, entropy, largest weight, weight on self, previous and first token, mean
distance, three windows, duplicates and induction targets. The dense side is written with whole-matrix torch operations;
its masks and distances, which depend on the tokens alone, are made outside the clock, ours inside. The forms are
compared on the same inputs before they are timed. With one thread and with two; sides in turn; the ratio is the median.

Memory: the highest resident size of a fresh process for each length, less that after imports and inputs.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from ledger import paired, record
from transformers.models.llama.modeling_llama import eager_attention_forward

from microtome.kernels.attention_statistics import AttentionStatistics, KeyRule, attention_statistics

HEADS, KV_HEADS, WIDTH, WINDOWS = 9, 3, 64, (16, 64, 256)
SCALING = WIDTH**-0.5


class Attention(torch.nn.Module):
    """What the eager function reads off the attention module."""

    num_key_value_groups = HEADS // KV_HEADS


def drawn(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and tokens, 500 of them in random order."""
    generator = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(1, HEADS, length, WIDTH, generator=generator)
    k, v = (torch.randn(1, KV_HEADS, length, WIDTH, generator=generator) for _ in "kv")
    return q, k, v, torch.randint(0, 500, (1, length), generator=generator)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: torch.Tensor) -> AttentionStatistics:
    """Everything in one call."""
    before = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=-1)
    rules = [KeyRule(tokens, tokens), KeyRule(tokens, before)]
    return attention_statistics(q, k, v, None, scaling=SCALING, is_causal=True, windows=WINDOWS, rules=rules)


def token_masks(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the dense side multiplies weights with."""
    length = tokens.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    is_before = distance > 0
    before = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=-1)
    return {
        "additive": torch.where(distance >= 0, 0.0, torch.finfo(torch.float32).min)[None, None],
        "distance": distance.clamp(min=0).float(),
        "duplicate": ((tokens[0, :, None] == tokens[0]) & is_before).float(),
        "induction": ((tokens[0, :, None] == before[0]) & is_before).float(),
        **{f"within {w}": ((distance >= 0) & (distance < w)).float() for w in WINDOWS},
    }


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Eager attention, then statistics of its weights."""
    z, weights = eager_attention_forward(Attention(), q, k, v, masks["additive"], scaling=SCALING)
    found = {
        "z": z.transpose(1, 2),
        "entropy": torch.special.entr(weights).sum(-1),
        "largest": weights.amax(-1),
        "on_self": weights.diagonal(dim1=-2, dim2=-1),
        "on_previous": torch.nn.functional.pad(weights.diagonal(-1, dim1=-2, dim2=-1), (1, 0)),
        "on_first": weights[..., 0],
    }
    for name, mask in masks.items():
        if name != "additive":
            found[name] = torch.einsum("bhqk,qk->bhq", weights, mask)
    return found


def same(mine: AttentionStatistics, other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference."""
    by_name = {name: getattr(mine, name) for name in ("z", "entropy", "largest", "on_self", "on_previous", "on_first")}
    by_name |= {f"within {w}": mine.within[i] for i, w in enumerate(WINDOWS)}
    by_name |= {"duplicate": mine.on_rules[0], "induction": mine.on_rules[1]}
    return max(float((by_name[name] - other[name]).abs().max()) for name in by_name)


def peak_bytes(length: int, form: str) -> int:
    """Of one call, in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", str(length), "--form", form]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _print_peak(length: int, form: str) -> None:
    q, k, v, tokens = drawn(length)
    small = [part[:, :, :64] for part in (q, k, v)]
    ours(*small, tokens[:, :64])
    dense(*small, token_masks(tokens[:, :64]))
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size begins anew
    before = _highest_bytes()
    _ = ours(q, k, v, tokens) if form == "ours" else dense(q, k, v, token_masks(tokens))
    print(_highest_bytes() - before)


def _highest_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Compare, then time and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--memory-of", type=int)
    parser.add_argument("--form", default="ours")
    given = parser.parse_args()
    if given.memory_of:
        _print_peak(given.memory_of, given.form)
        return
    q, k, v, tokens = drawn(given.length)
    masks = token_masks(tokens)
    with torch.no_grad():
        difference = same(ours(q, k, v, tokens), dense(q, k, v, masks))
        assert difference < 1e-4, difference
        threads = torch.get_num_threads()
        for count in (1, 2):
            torch.set_num_threads(count)
            ratio, ratios = paired(lambda: dense(q, k, v, masks), lambda: ours(q, k, v, tokens), given.pairs)
            record(
                f"attention and head statistics, causal, {given.length} tokens, {count} thread(s)",
                ratio,
                ">= 2",
                ratio >= 2,
                "transformers' eager attention, then the same statistics from its weights",
                f"ratios {ratios}; largest difference {difference:.1e}",
            )
        torch.set_num_threads(threads)
    lengths = (1024, 2048, 4096)
    mine = {length: peak_bytes(length, "ours") / 2**20 for length in lengths}
    other = {length: peak_bytes(length, "dense") / 2**20 for length in lengths}
    assert mine[1024] > 1, f"{mine} MB: too little was seen to tell growth by"
    growth = mine[4096] / mine[1024]
    record(
        "memory of attention and head statistics from 1,024 to 4,096 tokens: growth",
        growth,
        "<= 6 (linear is 4), and <= 1/10 of the dense side at 4,096",
        growth <= 6 and mine[4096] <= other[4096] / 10,
        "eager attention and dense statistics",
        f"MB ours { ({n: round(x, 1) for n, x in mine.items()}) }, dense { ({n: round(x) for n, x in other.items()}) }",
    )


if __name__ == "__main__":
    main()
