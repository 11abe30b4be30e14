"""The causal test of transport operators: write what an operator makes over a site, and see what the model then says.

    effects = splice_effects(model, texts, splice_from_moments(moments, "resid_post.5", "resid_post.8"))
    effects.to_frame()

After the splice of Szablewski & Masiak (2025, arXiv 2508.17540), whose code writes over 1, 5 or all 256 tokens and
compares perplexity with that of zeros and of the operator's intercept. Added here: the identity copy, without which a
small change cannot be told from what the stream carries by itself; mean and shuffled operator; KL at the tokens
written over and behind them; intervals; and the first token and other sinks left alone, which in that code are written
over too (`sinks=True` does).

Beware: texts should be held out, in that the operator was not fitted on their documents. And a splice at all tokens
replaces what a block adds, nothing more: earlier tokens were read by the blocks between the sites as always.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn
from tqdm.auto import tqdm

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedText
from microtome.capture.fingerprint import new_fingerprint, tensor_bytes
from microtome.capture.models import LoadedModel
from microtome.capture.running_model import running_model
from microtome.capture.sites import Site
from microtome.capture.store_files import writing
from microtome.data.replaced_file import replaced_file
from microtome.lenses.corpus_pass import CorpusPass, corpus_pass
from microtome.lenses.documents import document_numbers
from microtome.lenses.transport.operator import TransportOperator
from microtome.lenses.transport.splice import splice_edits
from microtome.lenses.transport.splice_conditions import Splice
from microtome.lenses.transport.splice_effects import DRAWS, SpliceEffects, positions_name
from microtome.lenses.transport.splice_pass import SUMS, TEXT_SUMS, SplicePass
from microtome.lenses.transport.splice_positions import ALL, At, checked_positions
from microtome.lenses.unembedding import unembedding_of

SAVE_SECONDS = 15.0
_FILE = "splices.safetensors"


def splice_effects(
    model: LoadedModel | nn.Module,
    texts: Any,
    operators: Splice | TransportOperator | Sequence[Splice | TransportOperator],
    *,
    documents: Iterable[Any] | None = None,
    at: Sequence[At] | At = (1, 5, ALL),
    conditions: Sequence[str] | None = None,
    sinks: bool = False,
    first: int = 0,
    medians: Mapping[str, float] | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    anatomy: Anatomy | None = None,
    save: str | Path | None = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    **encoding: Any,
) -> SpliceEffects:
    """Run the texts clean and with every operator, number of tokens and condition.

    Args:
        model, texts, anatomy, max_tokens: as for `corpus_pass`; encoding: its truncate, max_length,
            add_special_tokens.
        operators: one or several, each with its controls (`Splice`) or alone.
        documents: name or number of the document of each text, for intervals; each its own if None.
        at: how many tokens of each text are written over, drawn by seed and text; "all" that may be.
        conditions: of `splice_conditions` and names of further operators; whatever each operator has if None.
        sinks: write over the first token of a text, special and massive tokens too.
        first: position before which nothing is written over.
        medians: `Moments.medians`, to find massive tokens by the same rule; without it sinks are first and special
            tokens.
        seed: of the drawn tokens, and of the bootstrap.
        draws: of the bootstrap.
        save: a folder; a run that was killed goes on from it, a finished one is read.
        progress: show a bar.

    Raises:
        ValueError: an operator of another model, a condition that an operator does not have, two operators of one
            pair, texts that all have too few tokens, NaN, and what `corpus_pass`, `unembedding_of` and `splice_edits`
            refuse; a folder of another request.
        KeyError, IndexError: a site that this model does not offer.
        BlockingIOError: another process writes to the folder.
    """
    splices = _splices(operators)
    anatomy = dissect(model.module if isinstance(model, LoadedModel) else model) if anatomy is None else anatomy
    end = unembedding_of(model, anatomy)
    names = tuple(_conditions(splice, conditions) for splice in splices)
    for splice in splices:
        for one in _operators(splice):
            one.require_model(model)
        splice_edits(splice.operator, anatomy=anatomy, token_ids=torch.zeros(1, 1, dtype=torch.int64))
        if Site.parse(splice.operator.target).kind == "logits":
            raise ValueError("An operator that writes logits changes no state that an unembedding reads.")
    last = "final_norm" if anatomy.final_norm is not None else f"resid_post.{anatomy.layers - 1}"
    plan = corpus_pass(model, texts, last, anatomy=anatomy, max_tokens=max_tokens, **encoding)
    job = SplicePass(
        plan,
        end,
        tuple(splice.to(end.weight.device) for splice in splices),
        names,
        checked_positions(at),
        seed,
        sinks,
        first,
        dict(medians or {}),
    )
    if not any(_free(job, text) >= _least(job) for text in plan.texts):
        raise _too_short(job)
    of_text = document_numbers(documents, len(plan.texts))
    request = _request(job, max_tokens)
    with ExitStack() as lock:
        if save is not None:
            save = Path(save)
            save.mkdir(parents=True, exist_ok=True)
            lock.enter_context(writing(save))
        sums, text_sums = _run(job, request, save, progress)
    rows = [(*splices[n].key, positions_name(one), name) for n, one, name in job.cases]
    cases = pd.DataFrame(rows, columns=["source", "target", "route", "positions", "condition"])
    facts = {**plan.provenance, "seed": seed, "sinks": sinks, "first": first}
    found = SpliceEffects(cases, sums, text_sums, of_text, facts, draws, seed)
    if not found.sums[:, :, SUMS.index("spliced")].any(0).all():
        raise _too_short(job)
    return found


def _splices(operators: Any) -> tuple[Splice, ...]:
    listed = [operators] if isinstance(operators, Splice | TransportOperator) else list(operators)
    splices = tuple(one if isinstance(one, Splice) else Splice(one) for one in listed)
    if not splices:
        raise ValueError("there are no operators. Give at least one.")
    keys = [splice.key for splice in splices]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"two operators carry {' to '.join(next(key for key in keys if keys.count(key) > 1)[:2])} by one route. "
            "Give further ones of a pair as Splice(operator, others={name: ...})."
        )
    return splices


def _conditions(splice: Splice, wanted: Sequence[str] | None) -> tuple[str, ...]:
    names = splice.conditions if wanted is None else tuple(dict.fromkeys(wanted))
    if not names:
        raise ValueError("there are no conditions. Give at least one, or None for all there are.")
    for name in names:
        splice.writer(name)
    return names


def _operators(splice: Splice) -> list[TransportOperator]:
    return [splice.operator, *([splice.shuffled] if splice.shuffled is not None else []), *splice.others.values()]


def _least(job: SplicePass) -> int:
    return max([1, *(one for one in job.at if isinstance(one, int))])


def _free(job: SplicePass, text: EncodedText) -> int:
    """Tokens that may be chosen, as far as is known before the model runs."""
    place = torch.arange(text.length)
    may = (place >= job.first) & (place < text.length - 1)
    return int((may if job.sinks else may & (place > 0) & ~text.is_special).sum())


def _too_short(job: SplicePass) -> ValueError:
    return ValueError(
        f"no text offers {_least(job)} tokens to write over, each with a token behind it (sinks=False leaves the first "
        "and special ones alone, `first` those before it; a route needs a source). Give longer texts, or fewer tokens "
        "in `at`."
    )


def _run(
    job: SplicePass, request: dict[str, Any], folder: Path | None, progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    plan, forwards = job.plan, 1 + len(job.cases)
    done, held = _loaded(folder, request)
    sums = np.zeros((len(plan.texts), len(job.cases), len(SUMS)))
    text_sums = np.zeros((len(plan.texts), len(TEXT_SUMS)))
    if held is not None:
        sums, text_sums = held
    ticked = sum(plan.tokens_of(number) for number in range(done)) * forwards
    saved = time.monotonic()
    total = plan.tokens * forwards
    with tqdm(total=total, initial=ticked, desc="splices", unit="token", disable=not progress) as bar:
        for number in range(done, len(plan.batches)):
            at, part, of_text = job.run(number, bar.update)
            sums[list(at)], text_sums[list(at)] = part, of_text
            is_last = number + 1 == len(plan.batches)
            if folder is not None and (is_last or time.monotonic() - saved >= SAVE_SECONDS):
                _save(folder, request, number + 1, sums, text_sums)
                saved = time.monotonic()
    return sums, text_sums


def _request(job: SplicePass, max_tokens: int) -> dict[str, Any]:
    """What sums depend on, as JSON values."""
    plan: CorpusPass = job.plan
    return {
        "model": running_model(plan.module),
        "texts": plan.provenance["texts"]["token_ids_sha256"],
        "operators": [[*splice.key, _digest(splice)] for splice in job.splices],
        "conditions": [list(names) for names in job.conditions],
        "at": list(job.at),
        "seed": job.seed,
        "sinks": job.sinks,
        "first": job.first,
        "medians": job.medians,
        "max_tokens": max_tokens,
    }


def _digest(splice: Splice) -> str:
    digest = new_fingerprint()
    named = {"operator": splice.operator, "shuffled": splice.shuffled, **splice.others}
    for name, one in named.items():
        digest.update(name.encode())
        for tensor in () if one is None else (one.left, one.right, one.intercept):
            digest.update(b"-" if tensor is None else tensor_bytes(tensor))
    digest.update(b"-" if splice.mean is None else tensor_bytes(splice.mean))
    return digest.hexdigest()


def _save(folder: Path, request: dict[str, Any], done: int, sums: np.ndarray, text_sums: np.ndarray) -> None:
    facts = {"request": json.dumps(request), "batches": str(done)}
    with replaced_file(folder / _FILE) as scratch:
        save_file({"sums": sums, "text_sums": text_sums}, scratch, metadata=facts)


def _loaded(folder: Path | None, request: dict[str, Any]) -> tuple[int, tuple[np.ndarray, np.ndarray] | None]:
    if folder is None or not (folder / _FILE).is_file():
        return 0, None
    try:
        opened = safe_open(folder / _FILE, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{folder / _FILE} is damaged ({error}). Delete it and run again.") from error
    with opened as file:
        facts = file.metadata() or {}
        held = json.loads(facts.get("request", "{}"))
        wanted = json.loads(json.dumps(request))
        if differing := [name for name in wanted if held.get(name) != wanted[name]]:
            raise ValueError(
                f"{folder} holds splices of another request ({', '.join(differing)} differ). Nothing was changed. Give "
                "another folder, or delete that one."
            )
        return int(facts["batches"]), (file.get_tensor("sums"), file.get_tensor("text_sums"))
