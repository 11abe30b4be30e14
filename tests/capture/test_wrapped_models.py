"""Models that others have wrapped (adapters, int8 linears, offloading, half precision): right sites, or a refusal.

Every value is compared with something that the proof does not use: adapter arithmetic written out, the same model
unwrapped, or what transformers reports.
"""

import importlib.metadata
import warnings
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
from packaging.version import Version
from perturbation import perturb
from tiny_families import tiny_family
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.collect import capture
from microtome.capture.dissect import NotDissectable, dissect
from microtome.capture.forward_arguments import accepted_arguments, input_device
from microtome.capture.models import LoadedModel
from microtome.capture.precision import precision
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps

pytestmark = [  # what peft uses of transformers
    pytest.mark.filterwarnings(f"ignore:.*{name}.* is deprecated:FutureWarning")
    for name in ("is_gradient_checkpointing", "past_key_values")
]
TOKENS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(5))
ALL = {"gpt2": ["c_attn", "c_proj", "c_fc"], "llama": "all-linear"}
OUTPUT_PROJECTION = {"gpt2": "transformer.h.{}.attn.c_proj", "llama": "model.layers.{}.self_attn.o_proj"}
DOWN = {"gpt2": "transformer.h.{}.mlp.c_proj", "llama": "model.layers.{}.mlp.down_proj"}
INNER = ("base_layer", "lora_", "original_module", "modules_to_save")
SITES = ["attn_out.1", "mlp_out.1", "mlp_act.1", "z.1", "head_out.1", "q.1", "k.1", "v.1", "resid_post.1", "logits"]


def tiny(family: str) -> nn.Module:
    """The tiny model of a family with two layers."""
    return tiny_family(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 2})


def read(model: nn.Module, sites: list[str] = SITES, anatomy: Anatomy | None = None, **edits: Callable) -> dict:
    with torch.no_grad(), taps(model, sites, edits=edits.get("edits"), anatomy=anatomy) as tape:
        model(input_ids=TOKENS)
    return {site: tape[site] for site in sites}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    different = [site for site in a if not torch.equal(a[site], b[site])]
    assert not different


def assert_close(a: Tensor, b: Tensor, limit: float = 1e-5) -> None:
    assert float((a - b).abs().max()) <= limit * float(b.abs().max())


def found_whole(model: nn.Module) -> Anatomy:
    anatomy = dissect(model)
    assert anatomy.is_whole, [i for i in anatomy.proof if not i.holds][:3] or anatomy.coverage()
    assert not anatomy.unavailable
    return anatomy


# ---- adapters


@pytest.fixture(scope="module")
def peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft")


@pytest.fixture
def lora(peft) -> Callable:
    def config(targets: str | list[str], **options):
        is_conv1d = targets == ALL["gpt2"]
        common = {"r": 3, "lora_alpha": 7, "lora_dropout": 0.1, "fan_in_fan_out": is_conv1d}
        return peft.LoraConfig(target_modules=targets, **common, **options)

    return config


def off_zero(model: nn.Module, seed: int = 3) -> nn.Module:
    """Adapter matrices start at zero, where they do nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def effective_weight(linear: nn.Module, name: str = "default") -> Tensor:
    """`[d_in, d_out]` of an adapted linear: W^T + scaling (B A)^T."""
    base = linear.base_layer.weight if type(linear.base_layer).__name__ == "Conv1D" else linear.base_layer.weight.T
    factors = linear.lora_B[name].weight @ linear.lora_A[name].weight
    return base + linear.scaling[name] * factors.T


@pytest.mark.parametrize(
    ("wrap", "family"),
    [("get_peft_model", "gpt2"), ("get_peft_model", "llama"), ("task type", "gpt2"), ("injected", "llama")],
)
def test_adapted_linears_are_one_map(peft, lora, family: str, wrap: str) -> None:
    base = tiny(family)
    if wrap == "injected":  # what transformers' model.add_adapter does
        peft.inject_adapter_in_model(lora(ALL[family]), base)
        model = off_zero(base)
    else:
        kind = {"task_type": "CAUSAL_LM"} if wrap == "task type" else {}
        model = off_zero(peft.get_peft_model(base, lora(ALL[family], **kind)))
    anatomy = found_whole(model)
    assert not [tap.point.module for tap in anatomy.taps.values() if any(part in tap.point.module for part in INNER)]
    assert "left side, position ids cumsum" in anatomy.padding_errors
    seen = read(model)
    projection, down = base.get_submodule(OUTPUT_PROJECTION[family].format(1)), DOWN[family].format(1)
    with torch.no_grad():
        weight = effective_weight(projection).view(4, 8, 32)
        written = torch.einsum("bphd,hdm->bphm", seen["z.1"], weight)
        act_written = seen["mlp_act.1"] @ effective_weight(base.get_submodule(down))
        offset = base.get_submodule(down).base_layer.bias if family == "gpt2" else 0.0
    assert_close(seen["head_out.1"], written)
    assert seen["mlp_act.1"].shape[-1] == 48
    assert_close(act_written + offset, seen["mlp_out.1"])


def test_variants_of_lora(peft, lora) -> None:
    model = off_zero(peft.get_peft_model(tiny("llama"), lora("all-linear", use_dora=True, use_rslora=True)))
    found_whole(model)
    adapted = read(model)
    written = adapted["head_out.1"].sum(2)
    model.merge_adapter()
    merged = read(model)  # the same anatomy, found before the merge
    assert_close(written, merged["attn_out.1"])
    for site in SITES:
        assert_close(adapted[site], merged[site])


@pytest.mark.parametrize(
    ("state", "family"),
    [("merged", "gpt2"), ("disabled", "gpt2"), ("other adapter", "llama"), ("both adapters", "llama")],
)
def test_an_anatomy_found_in_one_state_of_the_adapters_reads_the_others(peft, lora, family: str, state: str) -> None:
    model = peft.get_peft_model(tiny(family), lora(ALL[family]), adapter_name="first")
    model.add_adapter("second", lora(ALL[family]))
    off_zero(model)
    first = lambda: model.set_adapter("first")  # noqa: E731
    switch: dict[str, tuple[Callable, Callable]] = {
        "merged": (model.merge_adapter, model.unmerge_adapter),
        "disabled": (model.base_model.disable_adapter_layers, model.base_model.enable_adapter_layers),
        "other adapter": (lambda: model.set_adapter("second"), first),
        "both adapters": (
            lambda: model.base_model.set_adapter(["first", "second"]),
            lambda: model.set_adapter("first"),
        ),
    }
    there, back = switch[state]
    there()
    anatomy = found_whole(model)
    for change in (lambda: None, back):
        change()
        seen = read(model, anatomy=anatomy)
        bias = model.get_submodule("base_model.model." + OUTPUT_PROJECTION[family].format(1)).base_layer.bias
        total = seen["head_out.1"].sum(2) + (0.0 if bias is None else bias.detach())
        assert_close(total, seen["attn_out.1"])


def test_an_adapter_on_queries_and_values_alone_is_in_them(peft, lora) -> None:
    base = tiny("llama")
    model = off_zero(peft.get_peft_model(base, lora(["q_proj", "v_proj"])))
    found_whole(model)
    attention = base.model.layers[1].self_attn
    seen = read(model, ["resid_pre.1", "q.1", "k.1", "v.1"])
    with torch.no_grad():
        normed = base.model.layers[1].input_layernorm(seen["resid_pre.1"])
        for kind, weight in (
            ("q", effective_weight(attention.q_proj)),
            ("k", attention.k_proj.weight.T),
            ("v", effective_weight(attention.v_proj)),
        ):
            assert_close(seen[f"{kind}.1"].flatten(2), normed @ weight)


def test_an_edit_of_a_head_through_an_adapter(peft, lora) -> None:
    base = tiny("llama")
    model = off_zero(peft.get_peft_model(base, lora("all-linear")))
    plain = read(model)
    edited = read(model, edits={"z.1.2": lambda z: -z})
    weight = effective_weight(base.model.layers[1].self_attn.o_proj).view(4, 8, 32)[2].detach()
    assert_close(edited["attn_out.1"] - plain["attn_out.1"], -plain["z.1"][:, :, 2] @ weight, 1e-4)
    removed = read(model, edits={"head_out.1.2": lambda written: -written})
    assert_close(removed["attn_out.1"], edited["attn_out.1"])


def test_heads_through_an_adapter_have_gradients_in_every_forward(peft, lora) -> None:
    model = off_zero(peft.get_peft_model(tiny("llama"), lora("all-linear")))
    factor = model.base_model.model.model.layers[1].self_attn.o_proj.lora_B["default"].weight
    with taps(model, [Read("head_out.1.2", keep_graph=True)]) as tape:
        for _ in range(2):
            model(input_ids=TOKENS)
            (gradient,) = torch.autograd.grad(tape.all("head_out.1.2")[-1].sum(), factor)
            assert float(gradient.abs().max()) > 0


def test_an_adapters_dropout_is_refused(peft, lora) -> None:
    model = off_zero(peft.get_peft_model(tiny("llama"), lora("all-linear")))
    anatomy = dissect(model)
    model.train()
    with pytest.raises(ValueError, match=r"two results for one input \(dropout\).*Call model.eval\(\) first"):
        read(model, ["head_out.1"], anatomy)


def test_adapted_embeddings_and_heads_are_read_with_the_adapter(peft, lora) -> None:
    model = off_zero(peft.get_peft_model(tiny("llama"), lora(["embed_tokens", "lm_head"], task_type="CAUSAL_LM")))
    anatomy = found_whole(model)
    assert anatomy.unembedding is not None
    assert anatomy.unembedding.endswith("lm_head")
    seen = read(model, ["embed", "resid_pre.0"])
    assert torch.equal(seen["embed"], seen["resid_pre.0"])


def test_copies_of_modules_that_are_trained_beside_an_adapter(peft, lora) -> None:
    wrapped = peft.get_peft_model(tiny("llama"), lora(["q_proj"], modules_to_save=["lm_head", "embed_tokens"]))
    model = off_zero(wrapped)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(0.5)
    anatomy = found_whole(model)
    assert not [tap.point.module for tap in anatomy.taps.values() if any(part in tap.point.module for part in INNER)]
    assert anatomy.unembedding is not None
    assert anatomy.unembedding.endswith("lm_head")


def test_scaled_activations_are_one_map(peft) -> None:
    targets = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    base = tiny("llama")
    model = peft.get_peft_model(base, peft.IA3Config(**targets)).eval()
    perturb(model, 1)
    found_whole(model)
    seen = read(model)
    down = base.model.layers[1].mlp.down_proj
    with torch.no_grad():
        scaled = seen["mlp_act.1"] * down.ia3_l["default"].flatten()
        assert_close(scaled @ down.base_layer.weight.T, seen["mlp_out.1"])


def test_a_map_and_something_beside_it_is_no_output_projection(peft) -> None:
    prompts = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("llama"), prompts).eval()
    perturb(model, 1)
    anatomy = dissect(model)
    anatomy.tap("z.0")
    with pytest.raises(KeyError, match="what the mixer adds is not made by one linear map alone"):
        anatomy.tap("z.1")
    anatomy.tap("attn_out.1")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("PromptTuningConfig", r"The stream .* is \[3, 15, 32\] for token ids \[3, 11\]"),
        ("PrefixTuningConfig", r"hands its blocks a key-value cache .*\(PEFT: get_base_model\(\)\)"),
    ],
)
def test_virtual_tokens_are_refused(peft, config: str, reason: str) -> None:
    model = peft.get_peft_model(tiny("llama"), getattr(peft, config)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(NotDissectable, match=reason):
        dissect(model.eval())


def test_texts_are_captured_through_an_adapter(peft, lora) -> None:
    model = off_zero(peft.get_peft_model(tiny("llama"), lora("all-linear", task_type="CAUSAL_LM")))
    loaded = LoadedModel.from_module(model, name="adapted")
    kept = capture(
        loaded, [TOKENS[0].tolist(), TOKENS[1, :4].tolist()], ["resid_post.1", "z.1"], "last", progress=False
    )
    seen = read(model, ["resid_post.1", "z.1"])
    for site in seen:
        assert_close(kept[site][0], seen[site][0, -1])
        assert_close(kept[site][1], seen[site][1, 3], 1e-4)


def test_an_adapter_that_transformers_adds(peft, lora) -> None:
    if Version(importlib.metadata.version("peft")) < Version("0.22"):
        pytest.skip("transformers 5.24 asks for peft 0.22 in add_adapter")
    model = tiny("llama")
    model.add_adapter(lora("all-linear"), "own")
    found_whole(off_zero(model))


# ---- maps told by what they do


def test_an_experts_input_is_no_mlp_act() -> None:
    """Routed and shared experts add up: the shared one's activations are part of the MLP's only."""
    with pytest.raises(KeyError, match="several maps add up to"):
        dissect(tiny_family("deepseek_v2", num_hidden_layers=2)).tap("mlp_act.1")


def test_a_wrapper_takes_what_its_only_callable_child_takes() -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module):
            super().__init__()
            self.model, self.notes = model, nn.ModuleDict()

        def forward(self, *args, **kwargs):
            return self.model(*args, **kwargs)

    model = tiny("gpt2")
    assert {"input_ids", "position_ids", "use_cache"} <= accepted_arguments(Wrapper(model))
    assert input_device(nn.Linear(2, 2, device="meta")) == torch.device("cpu")
    assert "input" not in accepted_arguments(tiny("llama"))  # its children are several


# ---- quantised linears


def int8(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


def test_linears_that_round_their_inputs() -> None:
    plain, model = tiny_family("llama"), int8(tiny_family("llama"))  # one MLP of three moves other positions by 1e-2
    assert precision(plain) == "full"
    assert precision(model) == "quantised"
    anatomy = dissect(model)
    assert [c.role for block in anatomy.blocks for c in block.contributions] == ["attention", "mlp"] * 3
    notes = {i.note for i in anatomy.proof if i.name == "sum"}
    assert notes == {"the model is quantised: its linear maps round their inputs"}
    sites = [site for site in SITES if "head_out" not in site]
    rounded, exact = read(model, sites), read(plain, sites)
    for site in sites:
        assert float((rounded[site] - exact[site]).norm() / exact[site].norm()) < 0.2, site
    missed = [i for i in anatomy.proof if not i.holds]
    assert {i.name for i in missed} == {"act sum", "head sum"}
    assert all(0.02 < i.error < 0.2 for i in missed)
    assert {site.kind for site in anatomy.unavailable} == {"head_out"}
    with pytest.raises(KeyError, match=r"head sum.* misses by 0\.0.* \(limit 2e-02\): the model is quantised"):
        anatomy.tap(f"head_out.{missed[0].site[-1]}")


def test_only_the_unembedding_of_gpt_2_is_an_nn_linear() -> None:
    anatomy = found_whole(int8(tiny("gpt2")))
    assert anatomy.unembedding == "lm_head"


# ---- offloading


def offloaded(model: nn.Module, how: str, folder: Path) -> nn.Module:
    cpu = torch.device("cpu")
    if how == "cpu":
        return accelerate.cpu_offload(model, cpu)
    if how == "disk":
        return accelerate.disk_offload(model, str(folder), cpu)
    stack = "transformer.h" if hasattr(model, "transformer") else "model.layers"
    rest = {"transformer.h": ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.ln_f", "lm_head"]}
    rest["model.layers"] = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]
    places = dict.fromkeys(rest[stack], "cpu") | {f"{stack}.{k}": "cpu" if k == 0 else "disk" for k in range(2)}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


@pytest.mark.parametrize(
    ("how", "family"), [("cpu", "gpt2"), ("disk", "llama"), ("device map", "gpt2"), ("device map", "llama")]
)
def test_offloaded_models_give_the_same_bits(family: str, how: str, tmp_path: Path) -> None:
    plain, model = tiny(family), offloaded(tiny(family), how, tmp_path)
    assert any(p.is_meta for p in model.parameters())
    assert input_device(model) == torch.device("cpu")
    anatomy = found_whole(model)
    assert anatomy.taps.keys() == dissect(plain).taps.keys()
    exact = [site for site in SITES if site != "head_out.1"]
    assert_same_bits(read(model, exact), read(plain, exact))
    assert_close(read(model, ["head_out.1"])["head_out.1"], read(plain, ["head_out.1"])["head_out.1"], 1e-6)
    edits = {"resid_post.0": lambda x: 0.1 * x, "z.1.2": lambda z: -z, "mlp_act.1": lambda a: a.flip(1)}
    assert_same_bits(read(model, ["logits"], edits=edits), read(plain, ["logits"], edits=edits))


def test_an_offloaded_model_is_captured_if_it_was_wrapped_before(tmp_path: Path) -> None:
    texts, sites = [TOKENS[0].tolist(), TOKENS[1, :4].tolist()], ["resid_post.1", "z.1", "logits"]
    plain = capture(LoadedModel.from_module(tiny("llama"), name="tiny"), texts, sites, "all", progress=False)
    loaded = LoadedModel.from_module(tiny("llama"), name="tiny")
    offloaded(loaded.module, "disk", tmp_path)
    kept = capture(loaded, texts, sites, "all", progress=False)
    assert all(torch.equal(kept[site], plain[site]) for site in sites)
    assert kept.provenance["model"]["state_sha256"] == plain.provenance["model"]["state_sha256"]


def test_offloaded_weights_cannot_be_hashed(tmp_path: Path) -> None:
    model = offloaded(tiny("llama"), "cpu", tmp_path)
    with pytest.raises(ValueError, match=r"hold no data.* wrap it before it is offloaded: LoadedModel.from_module"):
        LoadedModel.from_module(model, name="tiny")


# ---- half precision


@pytest.mark.parametrize(
    ("family", "dtype"), [("gpt2", torch.bfloat16), ("llama", torch.bfloat16), ("llama", torch.float16)], ids=str
)
def test_streams_in_half_precision_are_the_reported_hidden_states(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    assert precision(model) == "half"
    found_whole(model)
    with torch.no_grad(), taps(model, ["resid_pre", "resid_post.1", "final_norm"]) as tape:
        reported = model(input_ids=TOKENS, output_hidden_states=True).hidden_states
    assert len(reported) == 3
    for layer, state in enumerate(reported[:2]):
        assert tape["resid_pre", layer].dtype == dtype
        assert torch.equal(tape["resid_pre", layer], state)
    assert torch.equal(tape["final_norm"], reported[2])
