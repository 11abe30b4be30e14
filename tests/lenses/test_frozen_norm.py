import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from microtome.lenses.frozen_norm import frozen_norm

WIDTH = 33  # odd, so that signs cannot balance


def perturbed(norm: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return norm


NORMS = {
    "layer": (lambda: nn.LayerNorm(WIDTH, eps=1e-3), True, 1e-3),
    "layer without bias": (lambda: nn.LayerNorm(WIDTH, eps=1e-5, bias=False), True, 1e-5),
    "layer without gain": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), True, 1e-5),
    "rms": (lambda: nn.RMSNorm(WIDTH, eps=1e-2), False, 1e-2),
    "llama": (lambda: LlamaRMSNorm(WIDTH, eps=1e-6), False, 1e-6),
    "gemma": (lambda: Gemma2RMSNorm(WIDTH, eps=1e-6), False, 1e-6),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_read_off_what_it_does(kind):
    make, is_centred, eps = NORMS[kind]
    module = perturbed(make())
    norm = frozen_norm(module, WIDTH)
    assert norm.is_centred == is_centred
    assert norm.eps == pytest.approx(eps, rel=1e-2)
    weight = getattr(module, "weight", None)
    gain = torch.ones(WIDTH) if weight is None else weight + (kind == "gemma")
    torch.testing.assert_close(norm.gain, gain.detach().double(), rtol=1e-5, atol=1e-6)
    bias = getattr(module, "bias", None)
    torch.testing.assert_close(
        norm.shift, torch.zeros(WIDTH).double() if bias is None else bias.detach().double(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", NORMS)
def test_parts_sum_to_the_norm_of_the_whole_less_its_shift(kind):
    module = perturbed(NORMS[kind][0]())
    norm = frozen_norm(module, WIDTH)
    parts = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(1)) + 0.5
    whole = parts.sum(0)
    scale = norm.scale(whole)
    made = norm.of_parts(parts, scale)
    expected = module.forward(whole).detach().double()
    torch.testing.assert_close(made.sum(0) + norm.shift, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm(whole), expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        (parts.double() * norm.back(direction, scale)).sum(-1), (made * direction.double()).sum(-1)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_gain(dtype):
    module = perturbed(LlamaRMSNorm(WIDTH, eps=1e-5)).to(dtype)
    norm = frozen_norm(module, WIDTH)
    torch.testing.assert_close(norm.gain, module.weight.detach().double(), rtol=1e-2, atol=1e-2)


class HalfNorm(nn.Module):
    """Half of the coordinates are normed: no norm of a known kind."""

    def forward(self, x):
        a, b = x.split([16, WIDTH - 16], -1)
        return torch.cat([a / a.pow(2).mean(-1, keepdim=True).sqrt(), b / b.abs().mean(-1, keepdim=True)], -1)


@pytest.mark.parametrize("module", [HalfNorm(), nn.Tanh(), nn.Softmax(-1), nn.Identity()])
def test_another_map_is_refused_with_its_error(module):
    with pytest.raises(ValueError, match=r"neither RMSNorm nor LayerNorm: .* by \d\.\de.\d\d of its largest value"):
        frozen_norm(module, WIDTH)


def test_a_module_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="Linear is no norm"):
        frozen_norm(nn.Linear(WIDTH, 4), WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_write_is_folded_in_its_own_dtype(dtype):
    module = perturbed(nn.LayerNorm(WIDTH))
    write = torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(1)).add(1).to(dtype)
    found = frozen_norm(module, WIDTH).folded(write)
    assert found.dtype == dtype
    expected = (write - write.mean(-1, keepdim=True)).double() * module.weight.detach().double()
    error = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=error, atol=error)


def test_no_norm_folds_to_the_identity():
    write = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    assert torch.equal(frozen_norm(None, WIDTH).folded(write), write)
