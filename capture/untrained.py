"""The same architecture without what training put into it: fresh weights, or the trained values in the wrong places.

    fresh = untrained(load_model("smollm2"), seed=0)         # as transformers initialises the configuration
    mixed = shuffled_weights(load_model("smollm2"), seed=0)  # every tensor keeps its values, permuted within it

Both keep configuration, tokenizer, dtype and device. What a probe reads from them is what the words and the wiring
give, not what was learned; show a trained model's score as a gain over them, with three seeds or more.

Beware: untrained networks score surprisingly high, since a random projection of the embeddings still tells tokens
apart. A fresh model's activations also have other sizes than a trained one's; `keep_norms` and `shuffled_weights` keep
the norm of every tensor, and leave less of a difference to scale alone.
"""

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from microtome.capture.models import LoadedModel


def untrained(model: LoadedModel, *, seed: int = 0, keep_norms: bool = False) -> LoadedModel:
    """A model of the same configuration with initial weights drawn under `seed`.

    keep_norms: multiply each tensor so that its Euclidean norm is the trained one's (zero tensors stay zero).
    Raises ValueError for a module that is no transformers model or whose weights are quantised.
    """
    fresh = _fresh(model, seed)
    if keep_norms:
        for new, old in _pairs(fresh, model):
            norm = new.float().norm()
            if norm > 0:
                new.mul_((old.float().norm() / norm).to(new.dtype))
    said = f"untrained, seed {seed}" + (", norms kept" if keep_norms else "")
    made = _described(fresh, model, said)
    return replace(made, provenance=replace(made.provenance, untrained=(f"all parameters ({said})",)))


def shuffled_weights(model: LoadedModel, *, seed: int = 0) -> LoadedModel:
    """The model with the values of each parameter in a random order within it; buffers stay.

    A norm's or bias's values change places too. Tied tensors are permuted once, and stay tied.
    Raises ValueError as `untrained`.
    """
    mixed = _fresh(model, seed)
    mixed.load_state_dict(model.module.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for new, old in _pairs(mixed, model):
        order = torch.randperm(old.numel(), generator=generator).to(old.device)
        new.copy_(old.detach().flatten()[order].view_as(old))
    said = f"weights shuffled within each tensor, seed {seed}"
    made = _described(mixed, model, said)
    before = model.provenance.quantisation
    return replace(made, provenance=replace(made.provenance, quantisation=f"{before}; {said}" if before else said))


def _fresh(model: LoadedModel, seed: int) -> PreTrainedModel:
    module = model.module
    if not isinstance(module, PreTrainedModel):
        raise ValueError(
            f"{type(module).__name__} is no transformers model, so its initial weights are not known. Build one "
            "yourself and wrap it: LoadedModel.from_module(module, tokenizer, name=...)."
        )
    if getattr(module.config, "quantization_config", None) is not None:
        raise ValueError(f"{model.provenance.name!r} has quantised weights. Load the model without quantisation first.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(module)(copy.deepcopy(module.config)).eval()
    trained = dict(module.named_parameters())
    for name, parameter in fresh.named_parameters():
        parameter.data = parameter.data.to(trained[name])
    return fresh.to(next(iter(trained.values())).device)


def _pairs(fresh: PreTrainedModel, model: LoadedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values of each new parameter, to be written into, beside the trained ones."""
    trained = dict(model.module.named_parameters())
    return [(parameter.data, trained[name].data) for name, parameter in fresh.named_parameters()]


def _described(module: PreTrainedModel, model: LoadedModel, said: str) -> LoadedModel:
    made = LoadedModel.from_module(module, model.tokenizer, name=f"{model.provenance.name} ({said})")
    return replace(made, no_tokenizer=model.no_tokenizer)
