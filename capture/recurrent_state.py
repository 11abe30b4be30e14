"""The recurrent state of a mixer, where transformers' cache holds it: found, read, written and proved.

A mixer that is called with a cache leaves its state there (`cache.layers[i].recurrent_states`): what it knows of the
text after the call's last token, padding included. The state is no tensor of the forward, so it is read after the call
of the mixer and written in place, and an edit acts from the next step on. Models that keep their state elsewhere (RWKV,
xLSTM, RecurrentGemma) do not expose it.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from microtome.capture.anatomy import Block, Identity, Point, Tap
from microtome.capture.forward_arguments import accepted_arguments
from microtome.capture.plain_hooks import plain_hooks
from microtome.capture.sites import Site

HIDDEN = "the model keeps no recurrent state of this mixer in transformers' cache"
STEP_LIMIT = 1e-3  # a step and a whole text sum in another order; a lost state misses by 0.1 and more


def state_in(args: tuple, kwargs: dict[str, Any], layer: int | str | None) -> Tensor | None:
    """The recurrent state of one layer in the cache among a module call's arguments; None without one."""
    return next((s for c in _caches(args, kwargs) if (s := _state(c, layer)) is not None), None)


def _caches(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Cache]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]


def _state(cache: Cache, layer: int | str | None) -> Tensor | None:
    held = cache.layers[layer] if isinstance(layer, int) and layer < len(cache.layers) else None
    return getattr(held, "recurrent_states", {}).get(0)


class RecurrentStates:
    """Finds the state of every block with a mixer by a forward with a cache, and proves it by going on from it.

    Attributes:
        taps: of each block whose mixer leaves a state.
        unavailable: why the others have none.
        record: the identities "state step" (a step from the cache is what the whole text gives), "state null edit" and
            "state edit" (the state of one row changed moves what the mixer adds in that row and in no other).
    """

    def __init__(self, model: nn.Module, blocks: list[Block], ids: Tensor | None, *, limit: float = STEP_LIMIT):
        self.model, self.limit = model, limit
        self.taps: list[Tap] = []
        self.unavailable: dict[Site, str] = {}
        self.record: list[Identity] = []
        self.cache_name = ""
        mixing = [block for block in blocks if any(c.role == "mixer" for c in block.contributions)]
        if not mixing or ids is None:
            return
        self.ids = ids
        try:
            self._find(mixing)
            self._prove(mixing)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
            self.taps, self.record = [], []
            reason = f"a forward with a cache failed: {type(error).__name__}: {str(error)[:120]}"
            self.unavailable = {block.site("state"): reason for block in mixing}

    def _find(self, blocks: list[Block]) -> None:
        paths = {path: block for block in blocks for path in _paths_below(self.model, block.path)}
        left: dict[Site, list[tuple[str, int]]] = {}

        def watch(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
                for cache in _caches(args, kwargs):
                    new = [i for i in range(len(cache.layers)) if _state(cache, i) is not None]
                    known = {i for made in left.values() for _, i in made}
                    for layer in new:
                        if layer not in known:  # the innermost module's call ends first
                            left.setdefault(paths[path].site("state"), []).append((path, layer))

            return hook

        with ExitStack() as handles:
            for path in paths:
                hook = self.model.get_submodule(path).register_forward_hook(watch(path), with_kwargs=True)
                handles.callback(hook.remove)
            output = self.model(input_ids=self.ids, attention_mask=torch.ones_like(self.ids), use_cache=True)
        accepted = accepted_arguments(self.model)
        for name, value in output.items():
            if isinstance(value, Cache):
                self.cache_name = name if name in accepted or "cache" not in accepted else "cache"
                for block in blocks:
                    for path, layer in left.get(block.site("state"), [])[:1]:
                        width = _state(value, layer).shape[-1]
                        self.taps.append(Tap(block.site("state"), Point(path, "cache", layer), width=width))
        found = {tap.site for tap in self.taps}
        self.unavailable = {b.site("state"): HIDDEN for b in blocks if b.site("state") not in found}

    def _prove(self, blocks: list[Block]) -> None:
        for tap in self.taps:
            block = next(b for b in blocks if b.site("state") == tap.site)
            term = next(c.point for c in block.contributions if c.role == "mixer")
            whole = self._term(term, self.ids, None)[:, -1]
            cache = self._cache()
            plain = self._term(term, self.ids[:, -1:], copy.deepcopy(cache))[:, -1]
            error = float((plain - whole).abs().max() / whole.abs().max())
            self.record.append(Identity("state step", str(tap.site), error, self.limit, error <= self.limit))
            held = _state(cache, tap.point.slot)
            noise = 10 * held.abs().max() * torch.randn(held.shape, generator=torch.Generator().manual_seed(4)).to(held)

            moves = []
            for row, size in ((0, 0.0), (0, 1.0), (1, 1.0)):
                changed = copy.deepcopy(cache)
                _state(changed, tap.point.slot)[row] += size * noise[row]
                moves.append((self._term(term, self.ids[:, -1:], changed)[:, -1] - plain).abs().flatten(1).amax(1))
            null = float(moves[0].max())
            self.record.append(Identity("state null edit", str(tap.site), null, 0.0, null == 0))
            rows = [(moved > 1e-6 * plain.abs().max()).nonzero().flatten().tolist() for moved in moves[1:]]
            wrong = sum(row not in found for row, found in enumerate(rows)) == 2 or any(
                set(found) - {row} for row, found in enumerate(rows)
            )
            note = f"the states of rows 0 and 1 moved rows {rows[0]} and {rows[1]}"
            self.record.append(Identity("state edit", str(tap.site), float(wrong), 0.0, not wrong, note))

    def _cache(self) -> Cache:
        ids = self.ids[:, :-1]
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)[self.cache_name]

    def _term(self, point: Point, ids: Tensor, cache: Cache | None) -> Tensor:
        """What a mixer adds, in the whole text or in a step from a cache."""
        seen: list[Tensor] = []
        options: dict[str, Any] = {"use_cache": False}
        if cache is not None:
            options = {"use_cache": True, self.cache_name: cache}
            if "position_ids" in accepted_arguments(self.model):  # Bamba counts a step wrongly by itself
                options["position_ids"] = torch.full_like(ids, self.ids.shape[1] - 1)
        with plain_hooks(self.model, {point: lambda x: seen.append(x.detach().clone())}):
            self.model(input_ids=ids, attention_mask=torch.ones_like(self.ids), **options)
        return seen[0]


def _paths_below(model: nn.Module, path: str) -> list[str]:
    return [f"{path}.{name}" if name else path for name, _ in model.get_submodule(path).named_modules()]
