"""What two captures must have in common to be parts of one store, and what may only change their last bits.

The request: the model as it runs, texts, positions, labels, sites, dtypes, generation and shards. The environment:
hardware, threads, batches, versions; where it differs between shards, these are equal to rounding, not byte for byte.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from microtome.capture.capture_plan import CapturePlan
from microtome.capture.generated import end_ids
from microtome.capture.job import CaptureJob
from microtome.capture.label_table import labels_sha256
from microtome.capture.running_model import running_model
from microtome.capture.sites import Site
from microtome.data.provenance import environment


def request_of(job: CaptureJob, plan: CapturePlan) -> dict[str, Any]:
    """The request of a planned capture, of JSON types. Reads every weight of the model once."""
    running = running_model(job.forwards.module)
    generation = None
    if job.generation is not None:  # other batches round otherwise, and may so choose or draw other tokens
        generation = asdict(job.generation) | {
            "end_ids": end_ids(job.forwards.module),
            "max_tokens": job.forwards.max_tokens,
        }
    return {
        "model's weights": running["weights"],
        "model's settings": running["settings"],
        "model's hooks": running["hooks"],
        "tokenizer": job.loaded.provenance.tokenizer_sha256,
        "texts": plan.texts,
        "strings, positions and token labels": plan.kept_sha256,
        "labels": labels_sha256(job.labels),
        "columns": [*(job.labels if job.labels is not None else ()), *job.token_labels],
        "sites": [str(site) for site in plan.layout],
        "dtype": [str(dtype)[6:] for dtype, _ in plan.layout.values()],
        "generation": generation,
        "edited sites": sorted(str(Site.parse(name)) for name in job.forwards.edits),
        "shards": [[shard.first, shard.stop] for shard in plan.shards],
    }


def environment_of(job: CaptureJob) -> dict[str, Any]:
    """What may change the last bits of a shard."""
    facts = environment()
    return {
        "processor": facts["processor"],
        "accelerator": facts["accelerator"],
        "device": str(job.forwards.home),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "microtome": facts["commit"] or facts["packages"].get("microtome"),
        "attention": job.loaded.provenance.attention,
        "max_tokens": job.forwards.max_tokens,
        "padding": None if job.forwards.anatomy.padding is None else vars(job.forwards.anatomy.padding),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def require_same(path: Path, held: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ValueError, naming what differs, unless a store was begun with this very request."""
    differing = [name for name in wanted if held.get(name) != wanted[name]]
    if not differing:
        return
    said = "; ".join(f"{name}: {_brief(held.get(name))} there, {_brief(wanted[name])} now" for name in differing[:4])
    raise ValueError(
        f"{path} holds another capture ({said}). Nothing was changed. Give another folder, or remove that one."
    )


def _brief(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-12:]}"
