"""Find a transformer's parts by the data flow of one recorded forward, and prove them before they are offered.

`dissect(model)` needs no list of model names and no attribute paths by family: blocks are a chain on the op
graph, contributions and factors come from walking the residual trunk, mixer and MLP are told apart by moving one
position, head layouts and q, k, v columns by matching values at transformers' attention interface. Then every identity
is checked on a second batch with ordinary hooks (`microtome.capture.proof`); only what holds is offered.
"""

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import Cache

from microtome.capture.anatomy import Anatomy, Point, Tap
from microtome.capture.anatomy_store import anatomy_key, keep, kept
from microtome.capture.batches import PaddingRecipe
from microtome.capture.block_parts import block_parts
from microtome.capture.forward_arguments import accepted_arguments, input_device, takes_any_keyword
from microtome.capture.head_layout import SeamRecord
from microtome.capture.hooks import ACTIVE
from microtome.capture.models import LoadedModel
from microtome.capture.opgraph import NoStorage, OpGraph, elements
from microtome.capture.padding import call_options, limit_for, padding_errors
from microtome.capture.proof import Proof
from microtome.capture.recurrent_state import STEP_LIMIT, RecurrentStates
from microtome.capture.seam_record import RecordedCall, recorded_seam_calls
from microtome.capture.sites import KINDS, Site
from microtome.capture.tail import Tail, find_tail, token_embedding
from microtome.capture.trunk import Chain, Norms, find_chains

_Known = tuple[Anatomy, list[ReferenceType[nn.Module]], frozenset[str]]
_KNOWN: "WeakKeyDictionary[nn.Module, _Known]" = WeakKeyDictionary()
_DISSECTING = threading.RLock()  # one at a time: recording hooks every module


class NotDissectable(ValueError):
    """A model in which no residual stream could be found; the message says what was looked for."""


def dissect(
    model: "nn.Module | LoadedModel", *, inputs: Mapping[str, Any] | None = None, again: bool = False
) -> Anatomy:
    """The proved anatomy of a model: its blocks, its offered sites and the record of every identity.

    The first call runs a handful of forwards on random tokens, without any taps that are open; the result is kept for
    as long as the module lives and consists of the same modules. It is also kept on disk (`MICROTOME_CACHE`): in
    another process a model of the same make takes two forwards, in which the cheap identities are checked again.

    Args:
        model: a transformers model, loaded or held; it is left exactly as it was.
        inputs: for models that do not read token ids (images, audio): two or more rows of model inputs to run on.
        again: forget what is known of this module and on disk, and start over (after its weights changed beyond
            recognition; a module that was replaced, added or removed is noticed).

    Raises:
        NotDissectable: in training mode, not deterministic, without token ids as input, without a chain of blocks, with
            a key-value cache of its own (prefix tuning), or with activations that are no plain tensors.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    if not isinstance(module, nn.Module):
        raise TypeError(f"dissect takes a model; got {model!r}. load_model(name) loads one.")
    given = frozenset(inputs or ())
    if not again and (known := _known(module, given)) is not None:  # no waiting for another model's dissection
        return known
    with _DISSECTING:
        if again or _known(module, given) is None:
            outer = ACTIVE.set(())
            try:
                with torch.inference_mode(False), torch.no_grad():
                    anatomy = _anatomy(module, inputs, again)
            finally:
                ACTIVE.reset(outer)
            _KNOWN[module] = anatomy, [ref(part) for part in _parts(module)], given
        return _KNOWN[module][0]


def _known(module: nn.Module, given: frozenset[str]) -> Anatomy | None:
    """What was found before, if the module still has the same modules and was given these inputs (or any, for none)."""
    known = _KNOWN.get(module)
    if known is None or not _is_made_of(module, known[1]) or (given and given != known[2]):
        return None
    return known[0]


def _parts(module: nn.Module) -> list[nn.Module]:
    return [part for _, part in module.named_modules(remove_duplicate=False)]


def _is_made_of(module: nn.Module, parts: "list[ReferenceType[nn.Module]]") -> bool:
    now = _parts(module)
    return len(now) == len(parts) and all(held() is part for held, part in zip(parts, now, strict=True))


def _anatomy(model: nn.Module, inputs: Mapping[str, Any] | None, again: bool) -> Anatomy:
    """From the store if its cheap identities hold on this model, else found and proved, and put there."""
    if model.training:
        raise NotDissectable(f"{type(model).__name__} is in training mode; call model.eval() first.")
    batches = probe_batches(model) if inputs is None else _given_batches(model, inputs)
    key = anatomy_key(model, inputs)
    if key is not None and not again and (held := _held_again(model, key, batches[0])) is not None:
        return held
    anatomy, tail = _dissect(model, batches)
    if key is not None:
        keep(key, model, anatomy, tail)
    return anatomy


def _held_again(model: nn.Module, key: str, batch: dict[str, Any]) -> Anatomy | None:
    started = time.perf_counter()
    if (known := kept(key)) is None:
        return None
    anatomy, tail = known
    cheap = Proof(model, list(anatomy.blocks), list(anatomy.taps.values()), tail, batch, is_quick=True)
    now = {(i.name, i.site): i for i in cheap.record}
    held_before = {(i.name, i.site): i.holds for i in anatomy.proof}
    if any(identity.holds != held_before.get(what, True) for what, identity in now.items()):
        return None
    proof = tuple(now.get((i.name, i.site), i) for i in anatomy.proof)
    return replace(anatomy, proof=proof, repeated=len(now), seconds=time.perf_counter() - started)


def _dissect(model: nn.Module, batches: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Anatomy, Tail]:
    started = time.perf_counter()
    graph, seams = _recorded(model, batches[0])
    chain, *others = _stacks(graph, batches[0])
    norms = Norms()
    stacks = [[block_parts(graph, c, k, seams, norms) for k in range(len(c.calls))] for c in (chain, *others)]
    # a chain beside the main one in which no block adds to a stream is no stack of blocks (convolutions before a model)
    parts = [part for s in stacks if s is stacks[0] or any(p.block.contributions for p in s) for part in s]
    tail = find_tail(graph, chain, norms)
    embedding = token_embedding(graph, batches[0].get("decoder_input_ids", batches[0].get("input_ids")))
    taps = [tap for part in parts for tap in part.taps] + _whole_model_taps(graph, tail, embedding)
    linears = {part.block.site("z"): part.linears for part in parts if part.linears}
    readers = {part.block.site("resid_mid"): part.mid_readers for part in parts}
    proof = Proof(model, [part.block for part in parts], taps, tail, batches[1], linears, readers)
    unavailable = {site: reason for part in parts for site, reason in part.unavailable.items()}
    unavailable |= _whole_model_refusals(tail, embedding)
    ids = batches[1].get("input_ids")
    states = RecurrentStates(model, [part.block for part in parts], ids, limit=max(STEP_LIMIT, proof.sums))
    unavailable |= states.unavailable
    proof.record += states.record
    taps += states.taps
    offered = {}
    for tap in taps:
        if not (reason := _refusal(tap, proof)):
            offered[tap.site] = tap
        elif (at_seam := _at_seam(tap, proof)) is not None:
            proof.forget(f"{tap.site.kind} edit", str(tap.site))
            offered[tap.site] = at_seam
        else:
            unavailable[tap.site] = reason
    main = [part.block for part in parts if not part.block.stack]
    errors = _padding_errors(model, main[-1].exit, batches[1])
    anatomy = Anatomy(
        model_class=type(model).__name__,
        blocks=tuple(part.block for part in parts),
        d_model=graph.nodes[chain.exit_node(graph, 0)].value.shape[-1],
        taps=offered,
        unavailable=unavailable,
        proof=tuple(proof.record),
        padding=next((recipe for recipe, error in errors.items() if error <= limit_for(model)), None),
        padding_errors={f"{r.side} side, position ids {r.position_ids}": e for r, e in errors.items()},
        final_norm=tail.norm.module if tail.norm else None,
        unembedding=tail.unembedding,
        logits_factor=tail.factor,
        logits_cap=tail.cap,
        seconds=time.perf_counter() - started,
        proved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return anatomy, tail


def probe_batches(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two batches of random token ids, texts of unequal length, right-padded under an explicit mask.

    Batch and length differ from every small number in the model's shapes, so that axes can be told apart by size. The
    batches differ in rows, length and padding, so that no factor that depends on them passes for a number.

    Raises:
        NotDissectable: the model does not take token ids, or has no token embedding.
    """
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    accepted, name = accepted_arguments(model), type(model).__name__
    if "input_ids" not in accepted:
        raise NotDissectable(
            f"{name}.forward takes no input_ids, but {', '.join(sorted(accepted)) or 'nothing'}. Hand dissect(model, "
            "inputs=...) two or more rows of what it takes, such as a processor makes of images or sounds."
        )
    if embedding is None:
        raise NotDissectable(
            f"{name} has no get_input_embeddings() that returns its token embedding, so it is not known which ids "
            "there are. Add the method, or hand dissect(model, inputs=...) two or more rows of token ids."
        )
    if "attention_mask" not in accepted and not takes_any_keyword(model):
        raise NotDissectable(
            f"{name}.forward takes no attention_mask, so texts of unequal length cannot run together. Give it that "
            "argument (a model that runs texts one by one may ignore it)."
        )
    sizes = {n for p in model.parameters() for n in p.shape}
    sizes |= {n for n in vars(getattr(model, "config", embedding)).values() if isinstance(n, int)}
    lengths = [n for n in (11, 13, 17, 19, 23, 29, 31) if n not in sizes]
    vocabulary = embedding.weight.shape[0]
    batches = []
    for seed, (rows, length) in enumerate(((3, lengths[0]), (2, lengths[1]))):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(min(3, vocabulary - 1), vocabulary, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - 4 - seed :] = 0
        mask[2:, length - 2 :] = 0
        device = input_device(model)
        batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        if "decoder_input_ids" in accepted and getattr(model.config, "is_encoder_decoder", False):
            written = torch.randint(min(3, vocabulary - 1), vocabulary, (rows, length - 2), generator=generator)
            batch["decoder_input_ids"] = written.to(device)
        batches.append(batch)
    return batches[0], batches[1]


def _given_batches(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The given inputs, and the same rows in reverse order with noise on what is not whole numbers."""
    device = input_device(model)
    first = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    tensors = [v for v in first.values() if isinstance(v, Tensor)]
    if not tensors or any(t.ndim < 2 or len(t) < 2 for t in tensors):
        shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for k, v in first.items()}
        raise NotDissectable(f"inputs must hold tensors of two or more rows; got {shapes}. Give two or more rows.")
    generator = torch.Generator().manual_seed(0)

    def varied(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value.flip(0) if isinstance(value, Tensor) else value
        noise = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
        return value.flip(0) + noise * value.std()

    return first, {k: varied(v) for k, v in first.items()}


def _padding_errors(model: nn.Module, exit: Point, batch: dict[str, Any]) -> dict[PaddingRecipe, float]:
    if "input_ids" not in batch or "attention_mask" not in batch or "decoder_input_ids" in batch:
        return {}
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return padding_errors(model, exit, [ids[mask.bool()] for ids, mask in rows], pad_id=int(batch["input_ids"][0, 0]))


def _recorded(model: nn.Module, batch: dict[str, Any]) -> tuple[OpGraph, list[SeamRecord]]:
    options = call_options(model)
    first, second = (_first_tensor(model(**batch, **options)) for _ in range(2))
    if bool(first.isnan().any()):
        raise NotDissectable(
            f"{type(model).__name__} returns NaN for random tokens: some of its weights are NaN, or it overflows in "
            f"{first.dtype}. Look at its parameters, or load it in float32."
        )
    if not torch.equal(first, second):
        raise NotDissectable(
            f"{type(model).__name__} gives two results for the same input (largest difference "
            f"{float((first - second).abs().max()):.3g}), so nothing can be proved. Switch its randomness off."
        )
    with recorded_seam_calls(model) as calls, OpGraph(model) as graph:
        try:
            model(**batch, **options)
        except NoStorage as error:
            raise NotDissectable(str(error)) from error
        seams = [
            _seam_record(graph, path, number if len(made) > 1 else None, c)
            for path, made in calls.items()
            for number, c in enumerate(made)
        ]
    return graph, seams


def _seam_record(graph: OpGraph, path: str, number: int | None, made: RecordedCall) -> SeamRecord:
    q, k, v, z = (graph.node_of(tensor) for tensor in (made.query, made.key, made.value, made.z))
    made_in = max(i for i, call in enumerate(graph.calls) if call.path == path and call.first <= z)
    return SeamRecord(path, made_in, q, k, v, z, number)


def _first_tensor(output: object) -> Tensor:
    return next(t for _, t in elements(output) if t.is_floating_point())


def _stacks(graph: OpGraph, batch: Mapping[str, Any]) -> list[Chain]:
    """Every chain of blocks: first the main one, whose end reaches the model's output, then the others, named.

    A chain whose end goes into another chain that reaches the output (an encoder) is not the main one; of those left
    the heaviest is.
    """
    output = next(n for n in graph.calls[0].outputs.values() if graph.nodes[n].value.is_floating_point())
    needed = {node.index for node in graph.ancestors(output)}
    chains = [c for c in find_chains(graph) if graph.nodes[c.exit_node(graph, len(c.calls) - 1)].value.ndim == 3]
    ends = [chain.exit_node(graph, len(chain.calls) - 1) for chain in chains]
    reaching = [i for i, end in enumerate(ends) if end in needed]
    behind = {i: {node.index for node in graph.ancestors(ends[i])} for i in reaching}
    last = [i for i in reaching if not any(ends[i] in behind[j] for j in reaching if j != i)]
    if not last:
        raise NotDissectable(
            f"{type(graph.model).__name__} has no chain of blocks: modules in one list or of one class in one "
            "container, each of which takes the tensor [batch, position, width] that the one before returned, on the "
            "way to the output."
        )
    main = chains[last[0]]
    shape, ids = graph.nodes[ends[last[0]]].value.shape, batch.get("decoder_input_ids", batch.get("input_ids"))
    if ids is not None and shape[:2] != ids.shape:
        raise NotDissectable(
            f"The stream of {type(graph.model).__name__} is {list(shape)} for token ids {list(ids.shape)}; it must be "
            "[batch, position, width], or positions of tokens could not be told in it."
        )
    others = [chain for chain in chains if chain is not main and len(chain.calls) > 1]
    _require_all_blocks(graph, main, chains)
    _require_no_cache(graph, main)
    names = _stack_names(graph, main, others)
    return [main, *(replace(chain, stack=name) for chain, name in zip(others, names, strict=True))]


def _require_all_blocks(graph: OpGraph, main: Chain, chains: list[Chain]) -> None:
    """Raise if modules of the main list ran outside every chain: layers would be missing without a word."""
    container, _, _ = graph.calls[main.calls[0]].path.rpartition(".")
    chained = {graph.calls[i].path for chain in chains for i in chain.calls}
    ran = dict.fromkeys(call.path for call in graph.calls if call.path.rpartition(".")[0] == container)
    if left := [path for path in ran if path not in chained]:
        raise NotDissectable(
            f"{type(graph.model).__name__} runs {', '.join(left[:4])} in the list of its blocks, but not as blocks: "
            "none of the others takes what they return, or they take the stream at another argument."
        )


def _require_no_cache(graph: OpGraph, main: Chain) -> None:
    """Raise if blocks are given a key-value cache: run again on the same arguments, they would see their keys twice."""
    given = [graph.calls[i] for i in main.calls]
    if any(isinstance(value, Cache) for call in given for value in (*call.args, *call.kwargs.values())):
        raise NotDissectable(
            f"{type(graph.model).__name__} hands its blocks a key-value cache although none was asked for, so no block "
            "can be run again alone. Switch it off (a wrapper's forward can take use_cache and hand it on), or dissect "
            "the model without its prefix (PEFT: get_base_model())."
        )


def _stack_names(graph: OpGraph, main: Chain, others: list[Chain]) -> list[str]:
    """For each other stack the first part of its path that the main stack's has not; numbered from 2 if taken."""
    main_parts = graph.calls[main.calls[0]].path.split(".")
    names: list[str] = []
    for chain in others:
        parts = [part for part in graph.calls[chain.calls[0]].path.split(".") if not part.isdigit()]
        own = [part for i, part in enumerate(parts) if main_parts[i : i + 1] != [part]]
        first = own[0] if own else "_".join(parts[-2:])  # the main stack's modules in an earlier pass of a loop
        candidates = itertools.chain([first], (f"{first}_{k}" for k in itertools.count(2)))
        names.append(next(name for name in candidates if name not in {"", *names, *KINDS}))
    return names


def _whole_model_taps(graph: OpGraph, tail: Tail, embedding: Point | None) -> list[Tap]:
    width = lambda point: next(  # noqa: E731
        graph.nodes[c.outputs[point.slot]].value.shape[-1] for c in graph.calls if c.path == point.module
    )
    taps = []
    if embedding is not None:
        taps.append(Tap(Site("embed"), embedding, width=width(embedding)))
    if tail.norm is not None:
        taps.append(Tap(Site("final_norm"), tail.norm, width=width(tail.norm)))
    if tail.unembedding is not None:
        taps.append(Tap(Site("logits"), tail.output, width=width(tail.output)))
    return taps


def _whole_model_refusals(tail: Tail, embedding: Point | None) -> dict[Site, str]:
    refusals = {}
    if embedding is None:
        refusals[Site("embed")] = "no embedding op looks the token ids up"
    if tail.norm is None:
        refusals[Site("final_norm")] = tail.reason or "the unembedding reads the last block's output as it is"
    if tail.unembedding is None:
        refusals[Site("logits")] = tail.reason
    return refusals


def _at_seam(tap: Tap, proof: Proof) -> Tap | None:
    """Values at the attention interface, where those of a module are also used for something else (Doge's mask)."""
    pattern = proof.taps.get(replace(tap.site, kind="pattern"))
    if tap.site.kind != "v" or pattern is None or tap.heads is None:
        return None
    other = replace(tap, point=replace(pattern.point, slot="v"), heads=None)
    return None if _refusal(other, proof) else other


# which identities (at which site) a kind rests on
_RESTS_ON = {
    "resid_pre": [("sum", "resid_post")],
    "resid_post": [("sum", "resid_post")],
    "resid_mid": [("sum", "resid_post"), ("sum", "resid_mid")],
    "attn_out": [("sum", "resid_post"), ("edit", "attn_out"), ("role", "attn_out"), ("not empty", "attn_out")],
    "mlp_out": [("sum", "resid_post"), ("edit", "mlp_out"), ("role", "mlp_out"), ("not empty", "mlp_out")],
    "mixer_out": [("sum", "resid_post"), ("edit", "mixer_out"), ("role", "mixer_out"), ("not empty", "mixer_out")],
    "cross_out": [("sum", "resid_post"), ("edit", "cross_out"), ("role", "cross_out"), ("not empty", "cross_out")],
    "extra_out": [("sum", "resid_post"), ("edit", "extra_out"), ("role", "extra_out"), ("not empty", "extra_out")],
    "mlp_act": [("sum", "resid_post"), ("edit", "mlp_out"), ("act sum", "mlp_act"), ("act decides", "mlp_act")],
    "state": [("state step", "state"), ("state null edit", "state"), ("state edit", "state")],
    "z": [("head sum", "z")],
    "head_out": [("head sum", "z")],
}


def _refusal(tap: Tap, proof: Proof) -> str:
    """Why a site is not offered, or an empty string if every identity it rests on held."""

    def at(kind: str) -> str:
        return str(replace(tap.site, kind=kind))

    kind = tap.site.kind
    rests_on = [(name, at(other)) for name, other in _RESTS_ON.get(kind, [])]
    if proof.precision == "quantised":  # z and the neurons are what they are, however the map after them rounds
        rests_on = [("head split", at("z"))] if kind == "z" else [what for what in rests_on if what[0] != "act sum"]
    if tap.point.side == "seam":
        rests_on.append(("fires", proof.seam_label(tap.point)))
    elif tap.point.side != "cache":
        rests_on.append(("fires", proof.label(tap.point)))
    if kind in ("z", "head_out"):
        rests_on += [*proof.checked("head causality", at("z")), ("head order", at("z"))]
        if tap.point.side == "seam":
            rests_on.append(("seam parity", at("z")))
    if kind == "z_attn":
        rests_on += proof.checked("head causality", at(kind)) or [("head causality", at(kind))]
    if kind == "resid_mid":
        rests_on += [("edit", str(tap.site)), ("edit", tap.through or str(tap.site))]
    if kind == "router":
        rests_on += [("router sum", str(tap.site)), ("router edit", str(tap.site))]
    if kind in ("q", "k", "v") and tap.heads is not None:
        rests_on += proof.checked(f"{kind} edit", at(kind)) or [(f"{kind} edit", at(kind))]
    if kind in ("k", "v", "k_rot", "pattern"):
        rests_on += proof.checked("key groups", at("k"))
    if tap.point.side == "seam":
        rests_on.append(("seam parity", "logits"))
    if kind == "resid_post":
        rests_on += proof.checked("chain", str(tap.site))
    if kind == "resid_pre":
        rests_on += proof.stream_edits.get(tap.site.stack, [])
    if kind in ("logits", "final_norm"):
        rests_on += [("tail", "logits")] if any(i.name == "tail" for i in proof.record) else []
    rests_on.append(("null edit", "logits"))
    return "; ".join(proof.failure(name, site) for name, site in rests_on if not proof.holds(name, site))
