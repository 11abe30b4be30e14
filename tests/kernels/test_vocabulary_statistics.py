"""Streamed read-outs equal the dense definition for every tile size, and never hold tokens x vocabulary."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from microtome.kernels import vocabulary_tiles
from microtome.kernels.vocabulary_statistics import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    VocabularyStatistics,
    vocabulary_cross_entropy,
    vocabulary_kl,
    vocabulary_kl_learned,
    vocabulary_statistics,
)
from microtome.kernels.vocabulary_statistics_reference import (
    vocabulary_cross_entropy_reference,
    vocabulary_kl_learned_reference,
    vocabulary_kl_reference,
    vocabulary_statistics_reference,
)

DEPTH, TOKEN, WIDTH, VOCAB = 3, 11, 63, 500
END = {
    "plain": {},
    "bias": {"bias": True},
    "factor": {"factor": 0.25},
    "cap": {"cap": 4.0},
    "all": {"bias": True, "factor": 1.5, "cap": 3.0},
}


def case(end: str = "plain", dtype: torch.dtype = torch.float32, vocab: int = VOCAB, seed: int = 0) -> dict:
    """Inputs of `vocabulary_statistics`; a target is missing."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64) * 0.3
    options = dict(END[end])
    if options.pop("bias", False):
        bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
        options["bias"] = bias.to(dtype)
    final = torch.randn(TOKEN, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(DEPTH, TOKEN, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (TOKEN,), generator=generator)
    targets[:5] = torch.tensor([1, vocab - 1, vocab // 2, vocab // 3, -1])
    hidden = final + noise * torch.tensor([1.0, 0.1, 0.0], dtype=torch.float64)[:, None, None]
    return {
        "hidden": hidden.to(dtype),
        "weight": weight.to(dtype),
        "final": final.to(dtype),
        "targets": targets,
        **options,
    }


def widened(inputs: dict) -> dict:
    """The same numbers in float64."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def unchecked(function: Callable) -> Callable:
    """Without jaxtyping's look at shapes, which users do not have."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def assert_same(found: VocabularyStatistics, expected: dict, tolerance: float) -> None:
    for field in fields(found):
        value, wanted = getattr(found, field.name), expected.get(field.name)
        assert (value is None) == (wanted is None), field.name
        if value is not None and value.is_floating_point():
            torch.testing.assert_close(
                value.double(), wanted.double(), atol=tolerance, rtol=tolerance, equal_nan=True, msg=field.name
            )
        elif value is not None:
            assert torch.equal(value, wanted), field.name


@pytest.mark.parametrize("block", [1, 7, 64, 128, 256, 499, 500, 1024])
def test_every_block_size_is_the_dense_definition(block: int) -> None:
    inputs = case("bias")
    expected = vocabulary_statistics_reference(**widened(inputs))
    assert_same(vocabulary_statistics(**inputs, block=block), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("rows", [1, 4, 5, 13, 44, 1000])
def test_every_number_of_rows_is_the_dense_definition(rows: int) -> None:
    inputs = case("cap")
    expected = vocabulary_statistics_reference(**widened(inputs))
    assert_same(vocabulary_statistics(**inputs, rows=rows, block=128), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("end", list(END))
def test_every_end_of_a_model_in_every_dtype(end: str, dtype: torch.dtype) -> None:
    inputs = case(end, dtype)
    found = vocabulary_statistics(**inputs, block=192)
    assert found.entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_same(found, vocabulary_statistics_reference(**widened(inputs)), TOLERANCE[dtype])


@pytest.mark.parametrize("vocab", [1, 2, 63, 127, 129, 1025])
def test_odd_vocabularies(vocab: int) -> None:
    inputs = case("plain", vocab=max(vocab, 8))
    inputs |= {"weight": inputs["weight"][:vocab], "targets": inputs["targets"] % vocab, "top": min(5, vocab)}
    expected = vocabulary_statistics_reference(**widened(inputs))
    assert_same(vocabulary_statistics(**inputs), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("top", [1, 2, 200, VOCAB])
@pytest.mark.parametrize("block", [100, 128, 1024])
def test_any_number_of_top_tokens(top: int, block: int) -> None:
    inputs = case() | {"top": top}
    found = vocabulary_statistics(**inputs, block=block)
    assert_same(found, vocabulary_statistics_reference(**inputs), TOLERANCE[torch.float32])


@pytest.mark.parametrize("given", [(), ("final",), ("targets",), ("final", "targets")])
def test_what_is_not_given_is_left_out(given: tuple[str, ...]) -> None:
    inputs = {name: value for name, value in case().items() if name in ("hidden", "weight", *given)}
    found = vocabulary_statistics(**inputs)
    assert_same(found, vocabulary_statistics_reference(**widened(inputs)), TOLERANCE[torch.float32])
    if "targets" in given:
        torch.testing.assert_close(found.cross_entropy, -found.target_log_prob, equal_nan=True)
    else:
        assert found.cross_entropy is None


@pytest.mark.parametrize("block", [1, 50, 128, 300, 1024])
def test_among_equals_the_lower_id_comes_first(block: int) -> None:
    # small whole numbers: products are exact, and most logits are equal to many others
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-1, 2, (VOCAB, 4), generator=generator).float()
    hidden = torch.randint(-1, 2, (2, TOKEN, 4), generator=generator).float()
    targets = torch.randint(0, VOCAB, (TOKEN,), generator=generator)
    inputs = {"hidden": hidden, "weight": weight, "final": hidden[1], "targets": targets, "top": 7}
    found = vocabulary_statistics(**inputs, block=block)
    assert_same(found, vocabulary_statistics_reference(**inputs), 1e-5)
    logits = hidden @ weight.T
    for depth in range(2):
        for row in range(TOKEN):
            order = sorted(range(VOCAB), key=lambda v: (-float(logits[depth, row, v]), v))
            assert found.top_ids[depth, row].tolist() == order[:7]
            assert int(found.target_rank[depth, row]) == order.index(int(targets[row]))


def test_equal_and_rising_logits() -> None:
    nothing = vocabulary_statistics(torch.zeros(1, 2, 4), torch.randn(700, 4), targets=torch.tensor([0, 699]), block=64)
    assert nothing.top_ids.tolist() == [[[0, 1, 2, 3, 4]] * 2]
    assert nothing.target_rank.tolist() == [[0, 699]]
    rising = torch.arange(700.0)[:, None] / 100
    found = vocabulary_statistics(torch.ones(1, 2, 1), rising, targets=torch.tensor([0, 698]), block=64)
    assert found.top_ids.tolist() == [[[699, 698, 697, 696, 695]] * 2]
    assert found.target_rank.tolist() == [[699, 1]]


def test_copies_of_a_token_are_ties_in_real_products() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3000, 96, generator=generator)
    weight[1500:] = weight[:1500]
    hidden = torch.randn(9, 30, 96, generator=generator)
    targets = torch.arange(30) * 50 + 1500
    last = torch.arange(2990, 3000).repeat(3)
    tail, head = (
        vocabulary_statistics(hidden[:1], weight, targets=ids, rows=1, block=2990).target_rank
        for ids in (last, last - 1500)
    )
    assert torch.equal(tail, head + 1)
    for block in (1024, 700, 33):
        found = vocabulary_statistics(hidden, weight, targets=targets, top=6, block=block)
        pairs = found.top_ids.view(9, 30, 3, 2)
        assert torch.equal(pairs[..., 1], pairs[..., 0] + 1500)
        assert bool((found.target_rank % 2 == 1).all())
        again = vocabulary_statistics(hidden, weight, targets=targets - 1500, block=block)
        assert torch.equal(again.target_rank + 1, found.target_rank)


def test_equal_states_have_no_distance_and_a_small_distance_keeps_its_digits() -> None:
    generator = torch.Generator().manual_seed(2)
    final, weight = torch.randn(64, 96, generator=generator) * 2, torch.randn(5000, 96, generator=generator) * 0.2
    hidden = final + torch.tensor([0.0, 1e-3])[:, None, None] * torch.randn(64, 96, generator=generator)
    found = vocabulary_statistics(hidden, weight, final=final)
    exact = vocabulary_statistics_reference(hidden.double(), weight.double(), final=final.double())
    for name in ("kl", "kl_reverse"):
        value = getattr(found, name)
        assert bool((value >= 0).all())
        assert float(value[0].max()) < 1e-6
        assert float((value - exact[name]).abs().max()) < 1e-6
    assert bool(found.agrees[0].all())


def test_large_logits_stay_finite() -> None:
    inputs = case(dtype=torch.float64)
    inputs |= {"hidden": inputs["hidden"] * 400, "final": inputs["final"] * 400}
    found = vocabulary_statistics(**inputs, block=100)
    assert_same(found, vocabulary_statistics_reference(**inputs), 1e-9)


def test_a_state_with_nan_gives_no_number() -> None:
    inputs = case()
    inputs["hidden"][0, 5, 3] = torch.nan
    inputs["final"][7, 0] = inputs["hidden"][1, 7, 0] = torch.nan
    found = vocabulary_statistics(**inputs, block=128)
    assert_same(found, vocabulary_statistics_reference(**inputs), TOLERANCE[torch.float32])
    assert found.top_ids[0, 5].tolist() == [-1] * 5
    assert found.final_top_ids[7].tolist() == [-1] * 5
    assert int(found.target_rank[0, 5]) == -1
    assert not bool(found.agrees[0, 5])
    assert not bool(found.agrees[:, 7].any())
    for name in ("entropy", "kl", "kl_reverse", "target_log_prob", "log_sum_exp"):
        assert bool(getattr(found, name)[0, 5].isnan()), name
    assert bool(found.kl[:, 7].isnan().all())
    alone = vocabulary_statistics(torch.full((1, 2, WIDTH), torch.nan), inputs["weight"])
    assert bool((alone.top_ids == -1).all())
    assert bool(alone.top_log_probs.isnan().all())


def test_no_rows() -> None:
    inputs = case()
    inputs |= {"hidden": inputs["hidden"][:, :0], "final": inputs["final"][:0], "targets": inputs["targets"][:0]}
    found = vocabulary_statistics(**inputs)
    assert found.top_ids.shape == (DEPTH, 0, 5)
    assert found.kl.shape == (DEPTH, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(0, TOKEN, WIDTH)}, "No depth"),
        ({"weight": torch.zeros(VOCAB, WIDTH + 1)}, "width 63"),
        ({"weight": torch.zeros(0, WIDTH)}, "vocabulary is empty"),
        ({"final": torch.zeros(TOKEN + 1, WIDTH)}, "one state per token"),
        ({"bias": torch.zeros(VOCAB - 1)}, "one number per token"),
        ({"targets": torch.zeros(TOKEN - 1, dtype=torch.long)}, "one token id per row"),
        ({"targets": torch.full((TOKEN,), VOCAB)}, "from 0 to 499, or -1"),
        ({"targets": torch.full((TOKEN,), -2)}, "targets run from -2"),
        ({"top": 0}, "choose 1 to 500"),
        ({"top": VOCAB + 1}, "choose 1 to 500"),
        ({"cap": 0.0}, "positive number"),
        ({"factor": float("nan")}, "no finite number"),
        ({"block": 0}, "must be positive"),
        ({"rows": 0}, "must be positive"),
    ],
)
def test_what_does_not_fit_is_said(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unchecked(vocabulary_statistics)(**case() | change)


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self.elements = max(self.elements, leaf.numel())
        return made


def test_no_tensor_holds_more_than_a_tile_or_an_input() -> None:
    tokens, vocab, width = 400, 3000, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, tokens, width, generator=generator)
    weight, final = torch.randn(vocab, width, generator=generator), torch.randn(tokens, width, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    largest_input = max(hidden.numel(), weight.numel())
    limit = max(64 * 256, largest_input)
    assert limit < tokens * vocab / 20
    with Largest() as seen:
        vocabulary_statistics(hidden, weight, final=final, targets=targets, rows=64, block=256)
    assert seen.elements <= limit
    student, features = torch.randn(vocab, width, generator=generator, requires_grad=True), hidden[0]
    learning = hidden.clone().requires_grad_()
    for loss in (
        lambda: vocabulary_kl(learning, final, weight, rows=64, block=256),
        lambda: vocabulary_kl(learning, final, weight, cap=5.0, reverse=True, rows=64, block=256),
        lambda: vocabulary_cross_entropy(learning, targets, weight, rows=64, block=256),
        lambda: vocabulary_kl_learned(features, student, None, final, weight, rows=64, block=256),
    ):
        with Largest() as seen:
            loss().sum().backward()
        assert seen.elements <= limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("end", list(END))
@pytest.mark.parametrize("reverse", [False, True])
def test_kl_and_its_gradient_are_those_of_the_dense_form(end: str, reverse: bool, dtype: torch.dtype) -> None:
    inputs = case(end, dtype)
    del inputs["targets"]
    above = torch.randn(DEPTH, TOKEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hidden = inputs.pop("hidden").requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    expected = vocabulary_kl_reference(exact, **widened(inputs), reverse=reverse)
    (expected * above).sum().backward()
    found = vocabulary_kl(hidden, **inputs, reverse=reverse, rows=13, block=77)
    (found * above).sum().backward()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    assert hidden.grad.dtype == dtype
    error = (hidden.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
    assert float(error) < GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("end", list(END))
def test_cross_entropy_and_its_gradient_are_those_of_the_dense_form(end: str) -> None:
    inputs = case(end)
    del inputs["final"]
    hidden, targets = inputs.pop("hidden").requires_grad_(), inputs.pop("targets").clamp(min=0)
    exact = hidden.detach().double().requires_grad_()
    expected = vocabulary_cross_entropy_reference(exact, targets, **widened(inputs))
    expected.square().sum().backward()
    found = vocabulary_cross_entropy(hidden, targets, **inputs, rows=7, block=130)
    found.square().sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert float((hidden.grad - exact.grad).abs().max() / exact.grad.abs().max()) < 1e-4
    with pytest.raises(ValueError, match="leave out rows without one"):
        vocabulary_cross_entropy(hidden, targets - 1 - targets.min(), **inputs)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_kl_to_a_learned_unembedding_and_its_gradients(dtype: torch.dtype, has_bias: bool) -> None:
    inputs = case("all", dtype)
    del inputs["hidden"], inputs["targets"]
    generator = torch.Generator().manual_seed(4)
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4 for shape in ((TOKEN, 9), (VOCAB, 9))]
    made.append(torch.randn(VOCAB, generator=generator, dtype=torch.float64))
    above = torch.randn(TOKEN, generator=generator, dtype=torch.float64)
    learned = [tensor.to(dtype).requires_grad_() for tensor in made[: 2 + has_bias]]
    exact = [tensor.detach().double().requires_grad_() for tensor in learned]
    expected = vocabulary_kl_learned_reference(*exact, *([] if has_bias else [None]), **widened(inputs))
    (expected * above).sum().backward()
    found = vocabulary_kl_learned(*learned, *([] if has_bias else [None]), **inputs, rows=4, block=130)
    (found * above).sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for one, other in zip(learned, exact, strict=True):
        error = (one.grad.double() - other.grad).abs().max() / other.grad.abs().max()
        assert float(error) < GRADIENT_TOLERANCE[dtype]


def test_a_frozen_part_of_a_learned_unembedding_gets_no_gradient() -> None:
    inputs = case()
    weight = torch.zeros(VOCAB, WIDTH, requires_grad=True)
    vocabulary_kl_learned(
        inputs["final"], weight, torch.zeros(VOCAB), inputs["final"], inputs["weight"]
    ).sum().backward()
    assert inputs["final"].grad is None
    with pytest.raises(ValueError, match="must be equal"):
        unchecked(vocabulary_kl_learned)(inputs["final"], weight[1:], None, inputs["final"], inputs["weight"])
    value = vocabulary_kl_learned(inputs["final"], inputs["weight"], None, inputs["final"], inputs["weight"])
    assert float(value.max()) < 1e-6


def test_nothing_is_differentiated_twice() -> None:
    inputs = case()
    hidden = inputs["hidden"].requires_grad_()
    loss = vocabulary_kl(hidden, inputs["final"], inputs["weight"])
    (gradient,) = torch.autograd.grad(loss.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        gradient.sum().backward()


def test_inputs_are_left_alone() -> None:
    inputs = case("all")
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    vocabulary_statistics(**inputs)
    vocabulary_kl(inputs["hidden"].requires_grad_(), inputs["final"], inputs["weight"]).sum().backward()
    for name, value in before.items():
        assert torch.equal(inputs[name], value), name


def everything(inputs: dict) -> list[torch.Tensor]:
    """Numbers and gradients of all four functions, float32."""
    hidden, targets = inputs["hidden"].clone().requires_grad_(), inputs["targets"].clamp(min=0)
    end = {name: value for name, value in inputs.items() if name not in ("hidden", "final", "targets")}
    weight = end["weight"].detach().clone().mul_(1.1).requires_grad_()
    statistics = vocabulary_statistics(**inputs)
    losses = [vocabulary_kl(hidden, inputs["final"], **end), vocabulary_cross_entropy(hidden, targets, **end)]
    losses += [vocabulary_kl_learned(inputs["final"], weight, None, inputs["final"], **end)]
    gradients = torch.autograd.grad(sum(loss.sum() for loss in losses), [hidden, weight])
    found = [statistics.kl, statistics.entropy, statistics.target_log_prob, *losses, *gradients]
    return [value.detach() for value in found]


@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("around", ["autocast", "low precision allowed", "two threads", "inference"])
def test_what_is_switched_on_around_the_call_changes_no_number(
    around: str, has_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = case("all")
    expected = everything(inputs)
    if not has_onednn:
        monkeypatch.setattr(vocabulary_tiles, "uses_onednn", lambda _: False)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        if around == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = everything(inputs)
        elif around == "inference":
            with torch.inference_mode():
                found = [getattr(vocabulary_statistics(**inputs), n) for n in ("kl", "entropy", "target_log_prob")]
        else:
            torch.set_num_threads(2 if around == "two threads" else threads)
            torch.set_float32_matmul_precision("medium" if around != "two threads" else precision)
            found = everything(inputs)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    for value, wanted in zip(found, expected, strict=False):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, wanted, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_products_of_onednn_and_of_torch_agree_and_weights_may_lie_anyhow(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case("bias")
    expected = everything(inputs)
    across = inputs | {"weight": inputs["weight"].T.contiguous().T.requires_grad_()}
    strided = torch.randn(VOCAB, 2 * WIDTH)
    strided[:, ::2] = inputs["weight"]
    for other in (across, inputs | {"weight": strided[:, ::2]}):
        for value, wanted in zip(everything(other), expected, strict=True):
            torch.testing.assert_close(value, wanted, atol=2e-5, rtol=2e-5, equal_nan=True)
    monkeypatch.setattr(vocabulary_tiles, "uses_onednn", lambda _: False)
    for value, wanted in zip(everything(inputs), expected, strict=True):
        torch.testing.assert_close(value, wanted, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_a_weight_changed_in_place_is_read_anew() -> None:
    inputs = case()
    before = vocabulary_statistics(**inputs)
    inputs["weight"][3] += 5.0
    assert_same(vocabulary_statistics(**inputs), vocabulary_statistics_reference(**widened(inputs)), 2e-5)
    assert not torch.equal(before.entropy, vocabulary_statistics(**inputs).entropy)


def test_one_input_of_float64_makes_all_sums_float64() -> None:
    inputs = case()
    exact = vocabulary_statistics_reference(**widened(inputs))
    for name in ("hidden", "weight", "final"):
        mixed = inputs | {name: inputs[name].double()}
        found = vocabulary_statistics(**mixed)
        assert found.kl.dtype == torch.float64
        torch.testing.assert_close(found.kl, exact["kl"], atol=1e-11, rtol=1e-11)
        kl = vocabulary_kl(mixed["hidden"], mixed["final"], mixed["weight"])
        torch.testing.assert_close(kl, exact["kl"], atol=1e-11, rtol=1e-11)
