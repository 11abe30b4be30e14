"""The attention seam: a function beside each attention implementation through which q, k, v and z of every call pass.

transformers looks up attention by name: `AttentionInterface[config._attn_implementation]`. The seam registers
`microtome_sdpa` (`microtome_eager`, `microtome_flash_attention_2`, ...), which calls the implementation it stands
beside, with the same mask function, and shows each call to the interceptors of the running context. Without any it
passes everything through. Models stay on their implementation; none is switched to eager.

Beware: models whose attention does not use the interface (Bloom, MPT, Falcon, XLNet, ...) ignore the setting without
an error; `seam_calls` tells which modules really came through. Attention modules are told apart by identity, since
many have no layer number. `set_attn_implementation` on an attached model takes the seam out of it until the next
`attach` or `taps`.
"""

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from microtome.kernels.attention_rows import attention_rows
from microtome.kernels.attention_statistics import AttentionStatistics, attention_statistics

PREFIX = "microtome_"


class SeamName(str):
    """Name of the seam beside one implementation; equal to that implementation's name as well as to its own.

    Several models branch on `config._attn_implementation == "sdpa"` or `in ("eager", "sdpa")`, and validation does;
    with a name that is merely new they would take another branch, and the seam would not be inert. Lookups in the
    interface go by hash, which is that of the full name, so they find the seam.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    @property
    def beside(self) -> str:
        """Name of the implementation underneath."""
        return self.removeprefix(PREFIX)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and (str.__eq__(self, other) or str.__eq__(self.beside, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass(frozen=True)
class SeamCall:
    """One call of the attention interface, as the implementation gets it.

    Attributes:
        module: the attention module that calls.
        implementation: name of the implementation underneath.
        query: `[batch, head, query, d_head]`.
        key, value: `[batch, kv_head, key, d_head]`; with a cache, all keys so far.
        mask: what the model passes: None, a tensor, or an implementation's own mask object.
        options: every keyword of the call (scaling, softcap, s_aux, sliding_window, position_bias, ...).
    """

    module: nn.Module
    implementation: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: dict[str, Any] = field(default_factory=dict)

    def pattern_rows(self, heads: Sequence[int] | None, queries: Tensor | None) -> Tensor:
        """Attention probabilities `[batch, head, row, key]` of this call for chosen heads and query rows.

        Raises:
            TypeError: the mask is an object of the implementation (flex attention) from which rows cannot be read.
            ValueError: a head or row is out of range.
        """
        mask, settings = self._pattern_settings()
        return attention_rows(self.query, self.key, mask, heads=heads, queries=queries, **settings)

    def statistics(self, **asked: Any) -> AttentionStatistics:
        """Statistics of this call's pattern, without z. Raises TypeError as `pattern_rows` does.

        asked: the options of `kernels.attention_statistics` that choose them (windows, rules, marked, first_key), and
        `causal_offset`, the key number of the first query. With a cache the queries are the last keys, which is what is
        taken; only a cache with empty places behind them (`StaticCache`) needs it said.
        """
        mask, settings = self._pattern_settings()
        if not settings["is_causal"]:
            # nothing is masked by it, but it is where "self" and "previous" are
            settings["causal_offset"] = max(0, self.key.shape[2] - self.query.shape[2])
        return attention_statistics(self.query, self.key, None, mask, with_z=False, **settings | asked)

    def _pattern_settings(self) -> tuple[Tensor | None, dict[str, Any]]:
        """The mask, and what else decides the pattern, as the kernels name it."""
        if self.mask is not None and not isinstance(self.mask, Tensor):
            raise TypeError(
                f"{type(self.module).__name__} with {self.implementation!r} attention passes a "
                f"{type(self.mask).__name__} as mask; pattern rows need a tensor or None. "
                "Load the model with attn_implementation='sdpa' to read pattern."
            )
        n_queries, n_keys = self.query.shape[2], self.key.shape[2]
        is_flash = "flash" in self.implementation
        is_causal = self.options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(self.module, "is_causal", True)
        if self.implementation == "eager":
            is_causal = False  # transformers' eager functions know the mask alone
        elif not is_flash:
            is_causal = bool(is_causal) and self.mask is None and n_queries > 1
        scaling = self.options.get("scaling")
        return self.mask, {
            "scaling": self.query.shape[-1] ** -0.5 if scaling is None else scaling,
            "is_causal": bool(is_causal),
            "causal_offset": n_keys - n_queries if is_flash else 0,
            "sliding_window": self.options.get("sliding_window") if is_flash else None,
            "softcap": self.options.get("softcap"),
            "sinks": self.options.get("s_aux", self.options.get("sinks")),
            "position_bias": self.options.get("position_bias"),
        }


@runtime_checkable
class Interceptor(Protocol):
    """What may look at and change calls at the seam."""

    def arguments(self, call: SeamCall) -> SeamCall:
        """The call with which to go on."""
        ...

    def result(self, call: SeamCall, z: Tensor) -> Tensor:
        """The z, `[batch, query, head, d_head]`, with which to go on."""
        ...


@dataclass(eq=False)
class _Entered:
    """One `with intercepted(...)`; its context may have been copied, so that it says itself when it is over."""

    interceptor: Interceptor
    is_over: bool = False


_entered: ContextVar[tuple[_Entered, ...]] = ContextVar("microtome_seam", default=())


def _interceptors() -> tuple[Interceptor, ...]:
    """Those that look on here, outermost first, each once."""
    return tuple(dict.fromkeys(entered.interceptor for entered in _entered.get() if not entered.is_over))


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Show every call at the seam to this interceptor, in this context only; once, however often it is entered."""
    entered = _Entered(interceptor)
    _entered.set((*_entered.get(), entered))
    try:
        yield
    finally:
        entered.is_over = True
        _entered.set(tuple(other for other in _entered.get() if not other.is_over))


def switch_on(model: nn.Module) -> list[PreTrainedConfig]:
    """Put the seam beside the attention implementation of a model and of its submodels.

    It stays there, also where it was on for the time of a `seam_for_now` until here.

    Returns:
        The configurations that were changed: those that attention modules read and that had no seam yet.
    """
    with _switching:
        configs = _configs(model)
        for config in configs:
            _users.pop(id(config), None)
        return _switched_on(configs)


def _switched_on(configs: Sequence[PreTrainedConfig]) -> list[PreTrainedConfig]:
    changed = []
    for config in configs:
        setting = config._attn_implementation_internal
        if isinstance(setting, str) and not isinstance(setting, SeamName):
            config._attn_implementation_internal = _registered(setting)
            changed.append(config)
    return changed


# configurations whose seam is on for a time: by identity, with the number of those who are at it, in any thread
_users: dict[int, tuple[PreTrainedConfig, int]] = {}
_switching = threading.RLock()


@contextmanager
def seam_for_now(model: nn.Module) -> Iterator[None]:
    """Have the seam on; the last of those who are at it, in whatever thread, puts the setting back."""
    with _switching:
        configs = _configs(model)
        changed = {id(config) for config in _switched_on(configs)}
        ours = [config for config in configs if id(config) in changed or id(config) in _users]
        for config in ours:
            _users[id(config)] = config, _users.get(id(config), (config, 0))[1] + 1
    try:
        yield
    finally:
        with _switching:
            for config in ours:
                _, count = _users.pop(id(config), (config, 0))
                if count > 1:
                    _users[id(config)] = config, count - 1
                elif count == 1:
                    switch_off([config])


def switch_off(configs: Sequence[PreTrainedConfig]) -> None:
    """Give configurations their implementation's plain name back; a setting changed meanwhile stays as it is."""
    for config in configs:
        setting = config._attn_implementation_internal
        if isinstance(setting, SeamName):
            config._attn_implementation_internal = setting.beside


def seam_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """The distinct configurations of a model on which the seam is on."""
    return [c for c in _configs(model) if isinstance(c._attn_implementation_internal, SeamName)]


@contextmanager
def seam_observed(model: nn.Module, observe: Callable[[SeamCall, Tensor], None]) -> Iterator[None]:
    """Call `observe(call, z)` after every attention call of this context; afterwards the setting is as before."""
    with seam_for_now(model), intercepted(_Observer(observe)):
        yield


def seam_calls(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """How often each module of the model came through the seam while `run()` ran: path to count, absent if never."""
    paths = {module: path for path, module in model.named_modules()}
    counts: Counter[str] = Counter()

    def count(call: SeamCall, z: Tensor) -> None:
        if call.module in paths:
            counts[paths[call.module]] += 1

    with seam_observed(model, count):
        run()
    return dict(counts)


@dataclass(frozen=True, eq=False)
class _Observer:
    observe: Callable[[SeamCall, Tensor], None]

    def arguments(self, call: SeamCall) -> SeamCall:
        return call

    def result(self, call: SeamCall, z: Tensor) -> Tensor:
        self.observe(call, z)
        return z


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    found: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and _uses_interface(type(module)):
            found[id(config)] = config
    return list(found.values())


@cache
def _uses_interface(module_class: type[nn.Module]) -> bool:
    # transformers.modeling_utils, the file of every model's base class, is where the interface itself is defined.
    files = {base.__module__ for base in module_class.__mro__} - {AttentionInterface.__module__}
    return any(hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") for file in files)


def _registered(implementation: str) -> SeamName:
    name = SeamName(PREFIX + implementation)
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(str(name), _seam(implementation))
    # Without a mask function under the same name, transformers builds no mask at all.
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(str(name), ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def _seam(implementation: str) -> Callable:
    def microtome_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, Any]:
        interface, eager = _home(type(module))
        compute = interface.get_interface(implementation, eager)
        interceptors = _interceptors()
        if not interceptors:
            return compute(module, query, key, value, attention_mask, **options)
        call = SeamCall(module, implementation, query, key, value, attention_mask, options)
        for interceptor in interceptors:
            call = interceptor.arguments(call)
        z, *rest = compute(module, call.query, call.key, call.value, attention_mask, **options)
        for interceptor in interceptors:
            z = interceptor.result(call, z)
        return z, *rest

    return microtome_attention


@cache
def _home(attention_class: type[nn.Module]) -> tuple[AttentionInterface, Callable]:
    """The interface and the eager function that a class's own file uses.

    The eager function is no entry of the interface but the default of each lookup: the name ending in
    `eager_attention_forward` that the class's forward mentions (some files hold two), else the file's only one.
    """
    forward = inspect.unwrap(attention_class.forward)
    file = forward.__globals__
    mentioned = [n for n in forward.__code__.co_names if n.endswith("eager_attention_forward") and n in file]
    eager = file.get(mentioned[0] if mentioned else "eager_attention_forward", _no_eager_function)
    return file.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS), eager


def _no_eager_function(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    raise RuntimeError(
        f"{type(module).__name__} uses 'eager' attention, and its file {type(module).__module__} defines no "
        "eager_attention_forward. Load the model with attn_implementation='sdpa', or tap sites outside attention."
    )
