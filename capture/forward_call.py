"""What an edit may know of the forward it acts in: which tokens are real, where they stand, what came before.

    position[b, s] = number of real tokens of row b before column s, those in the cache included

counted from 0, so that neither padding nor a cache changes the position of a token. A call is read off the arguments
of the model when its forward begins.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

PADDING = -1


@dataclass(eq=False)
class BatchRows:
    """The texts of a batch, said by whoever makes the batch; it lives as long as the batch, or one generation of it.

    Attributes:
        texts: number of each row's text among all that were given.
        prompt_tokens: real tokens of each row's prompt; None where the first forward is the prompt.
        state: what edits keep from one forward of this batch to the next.
    """

    texts: Sequence[int]
    prompt_tokens: Sequence[int] | None = None
    state: dict[Any, Any] = field(default_factory=dict)


ROWS: ContextVar[BatchRows | None] = ContextVar("microtome_batch_rows", default=None)


@contextmanager
def batch_rows(texts: Sequence[int], prompt_tokens: Sequence[int] | None = None) -> Iterator[BatchRows]:
    """Say which texts the forwards inside the block run, and how long their prompts are.

    `capture`, `corpus_pass`, `next_token_kl` and generation do so by themselves; a loop of your own does where edits
    act by text or by "prompt" and "generated".
    """
    if prompt_tokens is not None and len(prompt_tokens) != len(texts):
        raise ValueError(f"{len(texts)} texts and {len(prompt_tokens)} lengths of prompts: give one for each.")
    held = BatchRows(tuple(texts), None if prompt_tokens is None else tuple(prompt_tokens))
    mark = ROWS.set(held)
    try:
        yield held
    finally:
        ROWS.reset(mark)


@dataclass(eq=False)
class ForwardCall:
    """One forward of a model.

    Attributes:
        arguments: those of the call, by name.
        before: the call before it in the same `with taps(...)`, if any.
        rows: the texts of the batch, where they were said.
        n_past: columns that the cache held when it began.
        number: how many forwards the same `with taps(...)` saw before.
        step: how many forwards came before it in this generation, or over this batch.
        state: what edits keep from one forward of a generation to the next.
        scratch: what they keep within this forward, from layer to layer.
    """

    arguments: Mapping[str, Any]
    before: "ForwardCall | None" = None
    rows: BatchRows | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self):
        before = self.before
        self.before = None  # a chain would hold every cache
        self.n_past = self._columns_before()  # now: layers fill the cache while they run
        self.number = 0 if before is None else before.number + 1
        continues = before is not None and before.rows is self.rows and (self.rows is not None or self.n_past > 0)
        self.step: int = before.step + 1 if before is not None and continues else 0
        own = self.rows.state if self.rows is not None else {}
        self.state: dict[Any, Any] = before.state if before is not None and continues else own
        self._first = before.first if before is not None and continues else None
        self._grew = before is not None and not continues and self.n_past == 0 and _is_longer(self, before)

    @property
    def first(self) -> "ForwardCall":
        """The forward of the prompt: this one, or the one that its cache goes back to."""
        return self if self._first is None else self._first

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of this call."""
        for name in ("input_ids", "inputs_embeds", "decoder_input_ids", "input_features", "pixel_values"):
            value = self.arguments.get(name)
            if isinstance(value, Tensor) and value.ndim >= 2:
                return int(value.shape[0]), int(value.shape[1])
        raise ValueError(f"No tokens among the arguments {sorted(self.arguments)}: this edit needs to know positions.")

    @cached_property
    def token_ids(self) -> Int[Tensor, "batch token"] | None:
        """Ids of this call's columns; None where embeddings were given."""
        ids = self.arguments.get("input_ids")
        return ids if isinstance(ids, Tensor) and ids.ndim == 2 else None

    @cached_property
    def _mask(self) -> Tensor | None:
        mask = self.arguments.get("attention_mask")
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask is {shape}: which tokens are real can be read off [batch, token] only. Give that, or "
                "an edit that asks for no positions."
            )
        return mask

    def _columns_before(self) -> int:
        """Columns that the cache holds when the call begins."""
        for value in self.arguments.values():  # its name changes: past_key_values, cache, cache_params
            if hasattr(value, "get_seq_length"):
                return int(value.get_seq_length())
        mask, ids = self.arguments.get("attention_mask"), self.token_ids
        if isinstance(mask, Tensor) and mask.ndim == 2 and ids is not None:
            return max(mask.shape[1] - ids.shape[1], 0)
        return 0

    @cached_property
    def is_real(self) -> Bool[Tensor, "batch token"]:
        """False at padding."""
        n = self.shape[1]
        if self._mask is None:
            device = next(v.device for v in self.arguments.values() if isinstance(v, Tensor))
            return torch.ones(self.shape, dtype=torch.bool, device=device)
        return self._mask[:, self.n_past : self.n_past + n].bool()

    @cached_property
    def positions(self) -> Int[Tensor, "batch token"]:
        """Of each column, counted in real tokens from 0; -1 at padding."""
        n_past, n = self.n_past, self.shape[1]
        if self._mask is None:
            columns = torch.arange(n_past, n_past + n, device=self.is_real.device)
            return columns.expand(self.shape)
        counted = self._mask[:, : n_past + n].bool().cumsum(1)[:, n_past:] - 1
        return torch.where(self.is_real, counted, PADDING)

    @cached_property
    def texts(self) -> Int[Tensor, " batch"]:
        """Numbers of the rows' texts; the rows themselves where nobody said."""
        device = self.is_real.device
        if self.rows is None:
            return torch.arange(self.shape[0], device=device)
        self._require_rows(len(self.rows.texts))
        return torch.tensor(self.rows.texts, device=device)

    @cached_property
    def prompt_tokens(self) -> Int[Tensor, " batch"]:
        """Real tokens of each row's prompt: as said, or all of the generation's first forward.

        Raises ValueError where texts grow without a cache and nobody said where their prompts end.
        """
        if self.rows is not None and self.rows.prompt_tokens is not None:
            self._require_rows(len(self.rows.prompt_tokens))
            return torch.tensor(self.rows.prompt_tokens, device=self.is_real.device)
        if self._grew:
            raise ValueError(
                "Texts go on without a cache, so that this forward does not say where prompts end. Run it inside "
                "`with batch_rows(range(n), prompt_tokens=[...])`, or with a cache."
            )
        if self._first is not None:
            return self._first.prompt_tokens
        return self.positions.max(1).values + 1

    def _require_rows(self, n: int) -> None:
        if n != self.shape[0]:
            raise ValueError(
                f"batch_rows names {n} texts, the batch has {self.shape[0]} rows. Beams and several returned sequences "
                "have no texts of their own here: give one row per text."
            )


def _is_longer(call: ForwardCall, before: ForwardCall) -> bool:
    """Whether these are the ids of the call before and one more."""
    ids, old = call.token_ids, before.token_ids
    if ids is None or old is None or ids.shape[0] != old.shape[0] or ids.shape[1] != old.shape[1] + 1:
        return False
    return bool((ids[:, :-1] == old).all())


@dataclass(eq=False)
class RunningForward:
    """Which forward runs, for the edits of one `with taps(...)`."""

    now: ForwardCall | None = None
    _before: ForwardCall | None = None
    _was_asked: bool = False

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward begins; or, before any edit has acted, its trunk does, whose arguments say more."""
        if self._was_asked:
            self._before, self._was_asked = self.now, False
        self.now = call_of(module, args, kwargs, self._before)

    def ask(self) -> ForwardCall | None:
        """The forward, for an edit that acts in it."""
        self._was_asked = True
        return self.now


_SIGNATURES: dict[type, inspect.Signature] = {}


def call_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: ForwardCall | None
) -> ForwardCall:
    """The forward that begins with this call of the model."""
    named = dict(kwargs)
    if args:
        signature = _SIGNATURES.get(type(module))
        if signature is None:
            signature = _SIGNATURES.setdefault(type(module), inspect.signature(type(module).forward))
        names = list(signature.parameters)[1:]
        named = dict(zip(names, args, strict=False)) | named
    return ForwardCall(named, before, ROWS.get())
