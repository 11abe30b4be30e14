# pyright: strict
"""What users write, for the type checker alone (`make check`): no part of it may be of unknown or unexpected type."""

from typing import assert_type

import torch
from torch import nn

from microtome.capture.models import LoadedModel, load_model
from microtome.capture.provenance import Provenance

loaded = load_model("smollm2", device="cpu", dtype=torch.float32)
assert_type(loaded, LoadedModel)
assert_type(loaded.module, nn.Module)
assert_type(loaded.provenance, Provenance)
assert_type(loaded.provenance.weight_sha256, str)
assert_type(loaded.provenance.to_dict(), dict[str, object])
assert_type(LoadedModel.from_module(nn.Linear(2, 2).eval(), name="mine"), LoadedModel)
