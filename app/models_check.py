"""`microtome models check NAME`: what was found in a model, how well every identity holds, and what is not offered."""

import json
from typing import TYPE_CHECKING

import pandas as pd

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel, load_model

if TYPE_CHECKING:
    from rich.console import Console


def check_model(name: str, *, as_json: bool = False, again: bool = False) -> Anatomy:
    """Dissect a model and print the proof, all of it proved anew with `again`.

    Raises what `load_model` and `dissect` raise.
    """
    from rich.console import Console  # late: importing rich draws from Python's random generator

    loaded = load_model(name)
    anatomy = dissect(loaded, again=again)
    if as_json:
        print(json.dumps(as_dict(loaded, anatomy), indent=1))
    else:
        print_anatomy(Console(highlight=False), loaded, anatomy)
    return anatomy


def identity_table(anatomy: Anatomy) -> pd.DataFrame:
    """One row per identity: at how many places it was checked and held, the largest error, and the limit."""
    by_name = anatomy.proof_table().groupby("name", sort=False)
    return by_name.agg(
        checked=("holds", "size"), held=("holds", "sum"), largest_error=("error", "max"), limit=("limit", "max")
    ).reset_index()


def as_dict(loaded: LoadedModel, anatomy: Anatomy) -> dict:
    """Everything as plain values."""
    return {
        "model": loaded.provenance.to_dict(),
        "stacks": anatomy.stacks,
        "d_model": anatomy.d_model,
        "is_whole": anatomy.is_whole,
        "padding": None if anatomy.padding is None else vars(anatomy.padding),
        "padding_errors": {name: float(error) for name, error in anatomy.padding_errors.items()},
        "coverage": json.loads(anatomy.coverage().to_json(orient="records")),
        "identities": json.loads(identity_table(anatomy).to_json(orient="records", double_precision=15)),
        "proof": json.loads(anatomy.proof_table().to_json(orient="records", double_precision=15)),
        "seconds": round(anatomy.seconds, 2),
        "proved_at": anatomy.proved_at,
        "repeated": anatomy.repeated,
    }


def print_anatomy(console: "Console", loaded: LoadedModel, anatomy: Anatomy) -> None:
    """Identities, sites and reasons as tables."""
    from rich import box
    from rich.table import Table

    stacks = ", ".join(f"{layers} layers{f' in {name}' if name else ''}" for name, layers in anatomy.stacks.items())
    verdict = "proved in full" if anatomy.is_whole else "proved in part"
    if anatomy.repeated:
        verdict += f" on {anatomy.proved_at[:10]}, {anatomy.repeated} of {len(anatomy.proof)} identities repeated now"
    console.print(f"{loaded.provenance.name} ({anatomy.model_class}): {stacks}, d_model {anatomy.d_model}; {verdict}.")
    proof = Table("identity", "checked", "held", "largest error", "limit", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in identity_table(anatomy).itertuples():
        proof.add_row(row.name, str(row.checked), str(row.held), f"{row.largest_error:.1e}", f"{row.limit:.0e}")
    console.print(proof)
    sites = Table("site", "offered", "why not", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in anatomy.coverage().itertuples():
        sites.add_row(f"{row.stack}.{row.kind}".lstrip("."), f"{row.offered} of {row.of}", row.reason)
    console.print(sites)
    if anatomy.padding is not None:
        way = f"padded on the {anatomy.padding.side}, position ids {anatomy.padding.position_ids}"
    else:
        way = "no way of padding passed; texts run one by one"
    when = f"Found and proved in {anatomy.seconds:.1f} s."
    if anatomy.repeated:
        when = f"A kept proof; the cheap identities held again in {anatomy.seconds:.1f} s (--again proves all anew)."
    console.print(f"Batches: {way}. {when}", markup=False)
