"""`microtome transport`: what is carried between depths, as a run folder with tables, operators, figures and a report.

    <out>/<name>/          config.yaml, provenance, tables, operators/, figures, report.html, values/transport.json
    <out>/.<name>.fits/    moments and splices so far

How a run is stopped, resumed and finished: `run_folder.py`. Documents are divided into fit, validation and test; every
number that is told is of the test documents.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor

from microtome.app.drawn_texts import drawn_texts
from microtome.app.grid_cells import shortened
from microtome.app.kept_fits import made_once
from microtome.app.repeatable import contents_of, repeatable
from microtome.app.run_folder import RunFolder
from microtome.app.transport_config import TransportConfig
from microtome.app.transport_words import transport_figures, transport_sections
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel, load_model
from microtome.capture.sites import Site
from microtome.data.runs import Run
from microtome.data.spoken import spoken_seconds
from microtome.figures.report import html_report
from microtome.lenses.depths import in_order
from microtome.lenses.dictionaries.dictionary import Dictionary
from microtome.lenses.dictionaries.reading import load_dictionary
from microtome.lenses.document_shards import SHARES, DocumentShards
from microtome.lenses.documents import document_numbers
from microtome.lenses.moments import Moments
from microtome.lenses.moments_pass import expand_sites, moments_of
from microtome.lenses.pair_splits import pair_splits
from microtome.lenses.token_windows import TokenWindows, token_windows
from microtome.lenses.transport.direction_origin import direction_origin
from microtome.lenses.transport.efficiency import transport_efficiency
from microtome.lenses.transport.feature_transport import feature_transport
from microtome.lenses.transport.fit import transport_operator
from microtome.lenses.transport.operator import TransportOperator
from microtome.lenses.transport.splice_conditions import Splice
from microtome.lenses.transport.splice_study import splice_effects
from microtome.lenses.transport.subspace import transport_subspace
from microtome.lenses.transport.transport_map import transport_map
from microtome.lenses.unembedding import unembedding_of

Pair = tuple[str, str]
STEPS = (1, 5, 10)
LEAST_DOCUMENTS = {"fit": 2, "validation": 1, "test": 5}  # the fewest that an interval over documents can be drawn from
MOST_ORIGINS = 20


@dataclass(frozen=True, eq=False)
class TransportRun:
    """A finished run: its folder and its tables by name (`pairs`, `by_distance`, `efficiency`, `whole`, `subspaces`,
    `features`, `feature_summary`, `origins`, `splices`, `tokens`)."""

    path: Path
    tables: dict[str, pd.DataFrame]


def run_transport(config: TransportConfig, *, progress: bool = True, say: Any = print) -> TransportRun:
    """Make the run, or read it if it is there already.

    Raises FileExistsError for another run of that name, BlockingIOError for one that another process makes, ValueError
    and KeyError for a model, data set, site or dictionary that cannot be used.
    """
    name = config.name or f"transport--{shortened(Path(config.model).name)}--{shortened(Path(config.data).stem)}"
    folder = RunFolder.at(config.out, name, "transport")
    table, facts = drawn_texts(
        config.data,
        texts=config.texts,
        text_column=config.text_column,
        group_column=config.group_column,
        seed=config.seed,
    )
    settings = _compared(config, facts)
    return made_once(
        folder,
        settings,
        lambda: load_model(config.model),
        lambda model: _made(config, model, table, facts, folder, settings, progress),
        lambda model: TransportRun(
            folder.path,
            folder.finished_tables(settings, model=config.model, weights=model.provenance.weight_sha256),
        ),
        say,
    )


def _made(
    config: TransportConfig,
    model: LoadedModel,
    table: pd.DataFrame,
    facts: dict,
    folder: RunFolder,
    settings: dict,
    progress: bool,
) -> TransportRun:
    started, kept = time.perf_counter(), folder.kept
    anatomy = dissect(model.module)
    sites, pairs = chosen_sites(anatomy, config)
    directions, encode, names = _directions(config, model, pairs)
    windows = token_windows(model, table["text"], documents=table["group"].tolist(), length=config.max_length)
    _require_shards(windows.documents, config)
    common = {"documents": windows.documents, "seed": config.seed, "checkpoint_minutes": 2.0, "progress": progress}
    moments = moments_of(model, windows.texts, sites, save=kept / "moments", **common)
    ends = list(dict.fromkeys(site for pair in pairs for site in pair))
    ends = [str(site) for site in in_order(ends)] if _all_have_depth(ends) else ends
    shuffled = moments_of(
        model,
        windows.texts,
        ends,
        pairs=list(pairs),
        shuffled=True,
        medians=moments.medians,
        save=kept / "shuffled",
        **common,
    )
    tables = _measured(config, moments, shuffled, pairs, progress)
    operators = [transport_operator(moments, *pair, rank=config.rank, metric="raw") for pair in pairs]
    nulls = [transport_operator(shuffled, *pair, rank=config.rank, metric="raw", shuffled=True) for pair in pairs]
    held = _test_windows(windows, moments)
    if directions:
        _add_features(tables, config, model, moments, operators, nulls, directions, encode, names, held, progress)
    if config.splices:
        splices = [
            Splice(operator, null, moments.pair(*pair).mean_y)
            for pair, operator, null in zip(pairs, operators, nulls, strict=True)
        ]
        spliced = spread_over(held.documents, config.splices)
        effects = splice_effects(
            model,
            [held.texts[i] for i in spliced],
            splices,
            documents=[held.documents[i] for i in spliced],
            medians=moments.medians,
            seed=config.seed,
            save=kept / "splices",
            progress=progress,
        )
        tables["splices"] = effects.to_frame()
    run = Run.create(
        kept, folder.path.name, repeatable(config, "out", "dictionary", "directions"), seed=config.seed, overwrite=True
    )
    seconds = time.perf_counter() - started
    counts = moments.counts()
    tables["tokens"] = counts
    run.record(model=model.provenance.to_dict(), data=facts, seconds=round(seconds, 3))
    for name, found in tables.items():
        run.write_table(name, found)
    for operator in operators:
        operator.to(torch.float32).save(run.path / "operators" / f"{operator.source}-{operator.target}")
    figures = transport_figures(tables)
    for name, figure in figures.items():
        run.write_figure(name, figure)
    fit = int(counts.set_index("shard").loc["fit", "rest"])
    run.write_report(
        html_report(
            f"{Path(config.model).name}: transport between {len(sites)} depths",
            transport_sections(tables, figures),
            lead=f"What an affine map carries from depth to depth, fitted on {fit:,} tokens of {facts['name']} and "
            f"told of test documents; first tokens and other sinks are left out. This took {spoken_seconds(seconds)}.",
            provenance=run.provenance,
            command=f"microtome transport --config {shlex.quote(str(folder.path / 'config.yaml'))}",
        )
    )
    folder.finish(run, settings, weights=model.provenance.weight_sha256)
    return TransportRun(folder.path, tables)


def chosen_sites(anatomy: Any, config: TransportConfig) -> tuple[list[str], list[Pair]]:
    """Sites of the map, in order of depth, and the pairs that are looked at in full.

    Raises:
        ValueError: a pair whose target does not lie behind its source.
        KeyError, IndexError: a site that the model does not offer.
    """
    depths = [str(site) for site in expand_sites(anatomy, "resid")]
    last = len(depths) - 1
    if config.pairs:
        named = [tuple(str(Site.parse(site)) for site in pair) for pair in config.pairs]
        for pair in named:
            anatomy.expand(list(pair))
            places = [Site.parse(site) for site in pair]
            if all(place.layer is not None for place in places) and _misplaced(*places):
                raise ValueError(f"pair {':'.join(pair)}: {pair[1]} does not lie behind {pair[0]}. Exchange them.")
    else:
        start = last // 3
        named = list(dict.fromkeys((depths[start], depths[min(start + step, last)]) for step in STEPS))
    kept = {*depths[:: config.every], depths[last], *(site for pair in named for site in pair)}
    stream = [site for site in depths if site in kept]
    return [*stream, *(site for site in sorted(kept) if site not in depths)], named


def _place(site: Site) -> float:
    """Depth as far as layers say it: the stream entering block l is that leaving l - 1; parts of l lie between."""
    assert site.layer is not None
    return site.layer + {"resid_pre": 0.0, "resid_post": 1.0}.get(site.kind, 0.5)


def _misplaced(source: Site, target: Site) -> bool:
    """Whether a target lies before its source or is the same tensor; parts of one block are not told apart."""
    is_stream = all(site.kind in ("resid_pre", "resid_post") for site in (source, target))
    return _place(source) > _place(target) or (is_stream and _place(source) == _place(target))


def _measured(
    config: TransportConfig, moments: Moments, shuffled: Moments, pairs: list[Pair], progress: bool
) -> dict[str, pd.DataFrame]:
    ranks = [rank for rank in config.ranks if rank <= min(moments.pairs.widths)]
    found = transport_map(moments, ranks=ranks, progress=progress)
    with_sinks = transport_map(moments, ranks=(), stratum="all", progress=progress).table
    rest = found.table.assign(tokens="without sinks")
    tables = {
        "pairs": pd.concat([rest, with_sinks.assign(tokens="with sinks")], ignore_index=True),
        "by_distance": found.by_distance(),
    }
    efficiency, whole, sizes = [], [], []
    for source, target in pairs:
        names = {"source": source, "target": target}
        splits = pair_splits(moments, source, target)
        curve = transport_efficiency(splits)
        efficiency.append(curve.table.assign(**names))
        whole.append(curve.whole.assign(**names))
        null = pair_splits(shuffled, source, target, shuffled=True)
        size = transport_subspace(splits, nulls=[null], draws=config.draws, seed=config.seed)
        sizes.append(size.table.assign(**names))
    for name, parts in (("efficiency", efficiency), ("whole", whole), ("subspaces", sizes)):
        joined = pd.concat(parts, ignore_index=True)
        tables[name] = joined[["source", "target", *(c for c in joined if c not in ("source", "target"))]]
    return tables


def _directions(
    config: TransportConfig, model: LoadedModel, pairs: list[Pair]
) -> tuple[dict[str, Tensor], dict[str, Dictionary], dict[str, list[str]]]:
    """Rows by target, dictionaries by target, and names of the rows."""
    rows: dict[str, list[Tensor]] = {target: [] for _, target in pairs}
    names: dict[str, list[str]] = {target: [] for target in rows}
    encode: dict[str, Dictionary] = {}
    if config.words:
        weight = unembedding_of(model).weight
        for word in config.words:
            ids = model.require_tokenizer()(word, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise ValueError(f"word {word!r} is {len(ids)} tokens. Give one of a single token, such as ' Paris'.")
            for target in rows:
                rows[target].append(weight[ids[0]].detach()[None])
                names[target].append(repr(word))
    if config.directions is not None:
        for name, tensor in load_file(config.directions.expanduser()).items():
            target = str(Site.parse(name))
            if target not in rows:
                raise ValueError(f"{config.directions}: {name} is no target of a pair. Targets: {', '.join(rows)}.")
            given = tensor.float() if tensor.ndim == 2 else tensor.float()[None]
            rows[target].append(given)
            names[target] += [f"given {number}" for number in range(len(given))]
    if config.dictionary is not None:
        dictionary = load_dictionary(config.dictionary.expanduser())
        site = None if dictionary.site is None else str(Site.parse(dictionary.site))
        matching = [target for target in rows if site is None or target == site]
        if not matching:
            raise ValueError(
                f"the dictionary is of {site}, which is no target of a pair: {', '.join(rows)}. Give --pair "
                f"SOURCE:{site}."
            )
        for target in matching:
            directions = dictionary.directions()
            rows[target].append(directions)
            names[target] += [f"feature {number}" for number in range(len(directions))]
            if len(rows[target]) == 1:  # a verdict on activations needs a feature for every row
                encode[target] = dictionary
    return {target: torch.cat(each) for target, each in rows.items() if each}, encode, names


def _add_features(
    tables: dict[str, pd.DataFrame],
    config: TransportConfig,
    model: LoadedModel,
    moments: Moments,
    operators: list[TransportOperator],
    nulls: list[TransportOperator],
    directions: Mapping[str, Tensor],
    encode: Mapping[str, Dictionary],
    names: Mapping[str, list[str]],
    held: TokenWindows,
    progress: bool,
) -> None:
    chosen = [number for number, operator in enumerate(operators) if operator.target in directions]
    found = feature_transport(
        model,
        held.texts,
        [operators[number] for number in chosen],
        directions,
        documents=held.documents,
        names={target: names[target] for target in directions},
        null=[nulls[number] for number in chosen],
        means=moments,
        encode={target: each.encode for target, each in encode.items()} or None,
        seed=config.seed,
        progress=progress,
    )
    tables |= {"features": found.table, "feature_summary": found.summary()}
    origins = [
        direction_origin(moments, rows, target, names=names[target]).table.assign(target=target)
        for target, rows in directions.items()
        if len(rows) <= MOST_ORIGINS and Site.parse(target).kind.startswith("resid") and target != moments.sites[0]
    ]
    if origins:
        tables["origins"] = pd.concat(origins, ignore_index=True)


def spread_over(documents: Sequence[Any], count: int) -> list[int]:
    """Numbers of so many windows, one of each document before a second of any."""
    turn = pd.Series(range(len(documents))).groupby(pd.Series(list(documents))).cumcount()
    return sorted(turn.sort_values(kind="stable").index[:count].tolist())


def _require_shards(documents: list[Any], config: TransportConfig) -> None:
    """Raise ValueError where fit or test would have too few documents, before anything runs."""
    numbers = np.unique(document_numbers(documents, len(documents)))
    split = DocumentShards.of(SHARES, seed=config.seed)
    held = pd.Series([split.names[number] for number in split.numbers(numbers.tolist())]).value_counts()
    for name, least in LEAST_DOCUMENTS.items():
        if held.get(name, 0) < least:
            raise ValueError(
                f"{len(numbers)} documents leave {held.get(name, 0)} for {name}, and {least} are needed at least. Draw "
                "more (--texts), name the column of documents (--group-column), or take another split (--seed)."
            )


def _test_windows(windows: TokenWindows, moments: Moments) -> TokenWindows:
    """Windows of the test documents."""
    shards = moments.shard_of(windows.documents)
    kept = [number for number, shard in enumerate(shards) if shard == "test"]
    texts, documents, starts = ([each[i] for i in kept] for each in (windows.texts, windows.documents, windows.starts))
    return TokenWindows(texts, documents, starts, windows.tokens, windows.left_out)


def _all_have_depth(sites: list[str]) -> bool:
    return all(Site.parse(site).kind.startswith("resid") for site in sites)


def _compared(config: TransportConfig, facts: dict) -> dict:
    """What makes two runs the same but the model's weights: the settings, with contents of files for their places."""
    settings = config.model_dump(mode="json", exclude={"out", "name", "data", "dictionary", "directions"})
    for name in ("dictionary", "directions"):
        settings[name] = contents_of(getattr(config, name))
    return settings | {"data": facts.get("name"), "texts_sha256": facts.get("table_sha256")}
