"""Read and edit a running model: `with taps(model, reads=["z"], edits={"resid_post.12": steer}) as tape: ...`.

A tap is a site and a function. A read keeps the site's value; an edit returns a delta that is added to it, so zeros
change nothing. Both act in every forward inside the context, steps of `generate` included, on every row of the batch,
and in no other thread or task.

Order: contexts nest, and at one place outer taps act before inner ones, edits of a context before its reads. So a
read sees the value after the edits of its own context and of those around it. Several edits of one tensor act one
after the other in the order given, each seeing what the ones before it did.

At the attention seam (q_rot, k_rot, and v where it is tapped there) a value with a cache covers all keys so far, and
deltas do not enter the cache: every step sees cached keys and values unedited, and edits them again.
Beware: a generator that yields inside the block leaves its taps on for whoever called it; `set_attn_implementation`
inside a context takes the seam off; detach before `torch.compile`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.attention_seam import seam_for_now
from microtome.capture.hooks import ActiveTaps, ForwardStopped, at_seam, close_taps, install, open_taps
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, EditFunction, Read, SiteName, TapPlan, plan_taps


class TapNeverFired(RuntimeError):
    """A read or edit never acted, so what was asked for did not happen."""


class Tape:
    """What the taps of one context have seen.

    `tape["z.5.3"]` or `tape["z", 5]` is the value of a site that fired once; `tape.all("resid_post.3")` is the list of
    all its values, one per forward (in `generate`, one per step). A head is cut out of the whole site if that was read.
    """

    def __init__(self, plan: TapPlan):
        self._plan = plan

    def __repr__(self) -> str:
        return f"Tape({', '.join(f'{site} x {fired}' for site, fired in self.firings.items()) or 'nothing read'})"

    def __iter__(self) -> Iterator[Site]:
        """The sites that are read."""
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __contains__(self, name: SiteName) -> bool:
        return Site.parse(name) in self._plan.reads

    def __getitem__(self, name: SiteName) -> Tensor:
        """The value of a site that fired once.

        Raises:
            KeyError: the site was not read.
            TapNeverFired: it has not fired yet.
            ValueError: it fired several times.
        """
        values = self.all(name)
        if not values:
            raise TapNeverFired(f"{Site.parse(name)} has not fired yet: run a forward inside the context first.")
        if len(values) > 1:
            site = Site.parse(name)
            raise ValueError(f"{site} fired {len(values)} times. Use tape.all({str(site)!r}) for all its values.")
        return values[0]

    def all(self, name: SiteName) -> list[Tensor]:
        """Every value of a site in the order of firing.

        Raises:
            KeyError: the site was not read.
        """
        site, reads = Site.parse(name), self._plan.reads
        if (read := reads.get(site)) is not None:
            return [value if isinstance(value, Tensor) else value() for value in read.values]
        whole = reads.get(site.whole)
        if whole is None or whole.select is not None:
            hint = f"{site.whole} was read through select=. " if whole is not None else ""
            raise KeyError(f"{site} was not read. {hint}Reads: {', '.join(map(str, reads)) or 'none'}.")
        return [value.select(1 if site.kind == "pattern" else 2, site.head) for value in self.all(site.whole)]

    @property
    def sites(self) -> list[Site]:
        """The sites that are read."""
        return list(self._plan.reads)

    @property
    def firings(self) -> dict[Site, int]:
        """How often each tapped site has fired."""
        counts: dict[Site, int] = {}
        for site, tap in (*self._plan.edits.items(), *self._plan.reads.items()):
            counts[site] = min(tap.fired, counts.get(site, tap.fired))
        return counts

    def clear(self) -> None:
        """Forget all values and firings, as if the context began now."""
        for tap in (*self._plan.edits.values(), *self._plan.reads.values()):
            tap.fired = 0
        for read in self._plan.reads.values():
            read.values.clear()


@contextmanager
def taps(
    model: nn.Module | LoadedModel,
    reads: Iterable[SiteName | Read] | SiteName | Read = (),
    edits: Mapping[SiteName, EditFunction | Edit] | None = None,
    *,
    anatomy: Anatomy | None = None,
    stop: bool = False,
) -> Iterator[Tape]:
    """Read and edit sites in every forward of this model inside the `with`, in this thread and task alone.

    Beware: gradient checkpointing runs forwards again in `backward`; call it inside the block, or what is computed
    again lacks the edits.

    Args:
        model: a transformers model, held or loaded; it gets hooks that stay, inert, until `detach(model)`.
        reads: sites to keep: names (`"resid_post.12"`, `"z.5.3"`, `("z", 5)`, `"z"` for all layers) or `Read`s.
        edits: for each site, a function that returns the delta to add to the value.
        anatomy: where the sites are; found by `dissect(model)` if not given.
        stop: end the forward as soon as every read and edit has fired, and with it the `with` block: later blocks and
            the language-model head do not run, and nothing after the forward call in the block does.

    Yields:
        A `Tape` with the values, of use inside and after the block.

    Raises:
        KeyError, IndexError: a site that this model does not offer (with the reason), or a head out of range.
        ValueError: a site asked for twice, a pattern without heads or queries, an edit's delta of the wrong shape.
        TypeError: an edit that is no function, or that returns no tensor.
        TapNeverFired: at the end of a block that raised nothing, a read or edit that never acted.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    if anatomy is None:
        from microtome.capture.dissect import dissect  # late: dissect may itself use taps

        anatomy = dissect(module)
    plan = plan_taps(module, anatomy, reads, edits or {})
    active = ActiveTaps(plan.at, [*plan.edits.values(), *plan.reads.values()], stop, plan.entrances, plan.running)
    install([(place, side) for side in ("in", "out") for place in plan.at[side]] + [(m, "in") for m in plan.entrances])
    install((place, "out") for place in plan.at["cache"])
    tape = Tape(plan)
    open_taps(active)
    try:
        with seam_for_now(module) if plan.uses_seam else nullcontext(), at_seam() if plan.uses_seam else nullcontext():
            yield tape
    except ForwardStopped as stopped:
        if stopped.taps is not active:
            raise
    finally:
        close_taps(active)
    _require_fired(plan, anatomy)


def _require_fired(plan: TapPlan, anatomy: Anatomy) -> None:
    live = [*plan.edits.values(), *plan.reads.values()]
    silent = [tap for tap in live if not tap.fired]
    if not silent:
        return
    names = ", ".join(f"{'edit of' if tap in plan.edits.values() else 'read of'} {tap.site}" for tap in silent[:6])
    if len(silent) == len(live) and not all(anatomy.tap(tap.site).point.side == "cache" for tap in silent):
        cause = "No forward of this model ran inside the context in this thread, or it raised before the first tap."
    elif all(anatomy.tap(tap.site).point.side == "cache" for tap in silent):
        cause = "The forward ran without a cache; call the model with use_cache=True."
    elif all(anatomy.tap(tap.site).point.side == "seam" for tap in silent):
        cause = "The attention setting was changed inside the context, or this path does not use the interface."
    else:
        cause = "The forward ended before them (an inner stop=True), or it took a path that skips these modules."
    more = f" and {len(silent) - 6} more" if len(silent) > 6 else ""
    raise TapNeverFired(f"Never fired: {names}{more}. {cause}")
