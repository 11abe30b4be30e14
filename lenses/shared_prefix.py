"""Many continuations of one prefix, the prefix run once: its keys and values are kept and repeated over the batch.

In a causal model nothing before a position depends on it, so the values at the continuation, and derivatives between
them, are those of the whole text. Positions are counted from the end (-1 is the last token): so they mean the same
whether or not the model takes a cache; where it takes none, or returns none, the prefix runs anew before each.
Beware: taps around `run` see the continuation alone where a cache is used, and prefix and continuation where not.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from microtome.capture.forward_arguments import accepted_arguments, input_device
from microtome.capture.padding import call_options

_NAMES = ("cache", "past_key_values")  # transformers renamed it in 5.24


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """A prefix and what the model keeps of it; made by `shared_prefix`.

    Attributes:
        ids: tokens of the prefix; may be empty.
        cache: the model's own cache after the prefix, None where the prefix is run anew.
        name: what the model's forward calls it.
    """

    module: nn.Module
    ids: list[int]
    cache: Any = None
    name: str = ""

    def run(self, continuations: Int64[Tensor, "batch position"]) -> Any:
        """The model's output for continuations of one length. Gradients flow if they are enabled around the call."""
        home = input_device(self.module)
        ids = continuations.to(home)
        if self.cache is None:
            before = torch.tensor(self.ids, dtype=torch.long, device=home).expand(len(ids), -1)
            return self.module(input_ids=torch.cat([before, ids], 1), **call_options(self.module))
        cache = copy.deepcopy(self.cache)  # the model appends to it in place
        if len(ids) > 1:
            cache.batch_repeat_interleave(len(ids))
        return self.module(input_ids=ids, use_cache=True, **{self.name: cache})


def shared_prefix(module: nn.Module, ids: list[int]) -> SharedPrefix:
    """Run the prefix once, without gradient."""
    accepted = accepted_arguments(module)
    name = next((name for name in _NAMES if name in accepted), None)
    if not ids or name is None:
        return SharedPrefix(module, list(ids))
    with torch.no_grad():
        output = module(input_ids=torch.tensor([ids], device=input_device(module)), use_cache=True)
    cache = getattr(output, name, None)
    return SharedPrefix(module, list(ids), cache if hasattr(cache, "batch_repeat_interleave") else None, name)


def common_prefix(rows: list[list[int]], limit: int) -> int:
    """How many first tokens all rows share, at most `limit`."""
    count = 0
    while count < limit and all(row[count] == rows[0][count] for row in rows):
        count += 1
    return count
