"""Many continuations of one prefix, the prefix run once: its keys and values are kept and repeated over the batch.

In a causal model nothing before a position depends on it, so the values at the continuation, and derivatives between
them, are those of the whole text. Positions are counted from the end (-1 is the last token): so they mean the same
whether or not the model takes a cache; where it takes none, or returns none, the prefix runs anew before each.
Whether a cache is good for this is tried on every prefix, not looked up: two continuations of three tokens must give
what the whole texts give. Some models with recurrent layers (Mamba, Jamba, Bamba) forget their state where several
tokens follow it, some cannot repeat it, and a model that looks both ways has no such prefix: all these run it anew.
Beware: taps around `run` see the continuation alone where a cache is used, and prefix and continuation where not.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from microtome.capture.forward_arguments import accepted_arguments, input_device
from microtome.capture.hooks import ACTIVE
from microtome.capture.limits import length_limit
from microtome.capture.padding import call_options, limit_for

_NAMES = ("cache", "past_key_values")  # transformers renamed it in 5.24
_TRIED = 3  # tokens of a continuation on which a cache is tried


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
    """Run the prefix once, without gradient. Raises ValueError for a module in training mode (dropout)."""
    if module.training:
        raise ValueError(f"{type(module).__name__} is in training mode. Call model.eval() first.")
    accepted = accepted_arguments(module)
    name = next((name for name in _NAMES if name in accepted), None)
    anew = SharedPrefix(module, list(ids))
    if not ids or name is None:
        return anew
    with torch.no_grad():
        output = module(input_ids=torch.tensor([ids], device=input_device(module)), use_cache=True)
    cache = getattr(output, name, None)
    if not hasattr(cache, "batch_repeat_interleave"):
        return anew
    kept = SharedPrefix(module, list(ids), cache, name)
    return kept if _goes_on(kept, anew) else anew


def _goes_on(kept: SharedPrefix, anew: SharedPrefix) -> bool:
    """Whether two texts go on behind the cache as they do behind the prefix itself."""
    limit = length_limit(kept.module, None)
    count = _TRIED if limit is None else max(1, min(_TRIED, limit - len(kept.ids)))
    some = (kept.ids * count)[:count]
    trial = torch.tensor([some, some[::-1]])
    outer = ACTIVE.set(())
    try:
        with torch.no_grad():
            whole = anew.run(trial)[0][:, -count:]
            behind = kept.run(trial)[0][:, -count:]
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # a layer of the cache that cannot be repeated, or a model that cannot go on from it
    finally:
        ACTIVE.reset(outer)
    return bool((behind - whole).abs().max() <= limit_for(kept.module) * whole.abs().max())


def common_prefix(rows: list[list[int]], limit: int) -> int:
    """How many first tokens all rows share, at most `limit`."""
    count = 0
    while count < limit and all(row[count] == rows[0][count] for row in rows):
        count += 1
    return count
