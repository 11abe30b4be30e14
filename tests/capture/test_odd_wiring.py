"""Blocks that are wired in ways that made a wrong site pass once: what is offered must be what it is called."""

import pytest
import torch
from tiny_families import built
from torch import Tensor, nn
from torch.nn import functional

from microtome.capture.dissect import NotDissectable, dissect
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps

IDS = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(5))
DELTA = torch.randn(32, generator=torch.Generator().manual_seed(3))


class Attention(nn.Module):
    """Causal attention of four heads of eight columns."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], 4, 8).transpose(1, 2)

    def z(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(map_(x)) for map_ in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.z(x).flatten(2))


class Mlp(nn.Module):
    """A pointwise map of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Plain(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.norm, self.norm_2 = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """An embedding, three blocks and an unembedding; every parameter is random."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(50, 32)
            self.blocks = nn.ModuleList([block() for _ in range(3)])
            self.head = nn.Linear(32, 50)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.3)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.through(self.embed(input_ids)))

    def through(self, x: Tensor) -> Tensor:
        """The blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def run(model: nn.Module, reads: list, edits: dict | None = None):
    """The tape of one forward."""
    with torch.no_grad(), taps(model, reads, edits, anatomy=dissect(model)) as tape:
        model(IDS)
    return tape


def is_refused(model: nn.Module, site: str, reason: str) -> None:
    """Whether a site is refused for a reason."""
    with pytest.raises(KeyError, match=reason):
        dissect(model).tap(site)


def test_the_plain_block_offers_everything() -> None:
    anatomy = dissect(Model(Plain))
    assert all(identity.holds for identity in anatomy.proof)
    kinds = {site.kind for site in anatomy.sites}
    assert kinds >= {"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_act", "q", "k", "v", "z"}


# ---- streams


class FusedAddNorm(Plain):
    """Adds what the block before left to the stream, and hands on what is to be added next."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self.attention(self.norm(residual)), residual


class Fused(Model):
    """A model of such blocks."""

    def through(self, x: Tensor) -> Tensor:
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return x + residual


def test_what_a_block_hands_on_to_be_added_later_is_no_stream() -> None:
    model = Fused(FusedAddNorm)
    is_refused(model, "resid_post.1", "the stream could not be followed through the block")
    is_refused(model, "resid_pre.1", "the stream could not be followed through the block")


class NoResidual(Plain):
    """A block that adds nothing to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def test_blocks_that_add_nothing_have_no_stream() -> None:
    is_refused(Model(NoResidual), "resid_post.1", "could not be followed|adds nothing")


class CarriesInDict(Plain):
    """Reads the stream a second time, from a dict."""

    def forward(self, x: Tensor, more: dict) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm_2(x)) + more["stream"].tanh() @ self.mlp.up.weight[:32]


class InDict(Model):
    """A model of such blocks."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, {"stream": x})
        return x


def test_a_stream_that_is_given_twice_is_not_edited_once() -> None:
    model = InDict(CarriesInDict)
    try:
        anatomy = dissect(model)
    except NotDissectable:
        return
    assert not any(site.kind == "resid_pre" for site in anatomy.sites)


class IgnoresReturns(Model):
    """Blocks work in place, and what they return is not used."""

    def through(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            block(x)
        return x


class InPlace(Plain):
    """Adds into its input."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(self.norm(x))
        x += self.mlp(self.norm_2(x))
        return x


def test_where_a_null_edit_changes_something_nothing_is_offered() -> None:
    model = IgnoresReturns(InPlace)
    try:
        anatomy = dissect(model)
    except NotDissectable:
        return
    if not all(identity.holds for identity in anatomy.proof if identity.name == "null edit"):
        assert not anatomy.taps


class ByLength(Plain):
    """A factor that depends on the length, one on the batch, one on nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x)) * (1 / x.shape[1])
        return x + self.mlp(self.norm_2(x)) * 0.5


class ByBatch(Plain):
    """A factor that depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x)) * len(x) ** 0.5


@pytest.mark.parametrize("block", [ByLength, ByBatch])
def test_a_factor_that_depends_on_the_batch_is_no_number(block: type[nn.Module]) -> None:
    is_refused(Model(block), "attn_out.1", "identity 'sum' misses by")


class Gated(Plain):
    """Factors that are parameters of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gate * self.attention(self.norm(x))
        return x + self.mlp(self.norm_2(x))


def test_a_factor_that_is_a_parameter_is_read_when_it_is_used() -> None:
    model = Model(Gated)
    anatomy = dissect(model)
    assert anatomy.tap("attn_out.1").vectors == ("blocks.1.gate",)
    with torch.no_grad():
        model.blocks[1].gate.fill_(2.0)
    before = run(model, ["resid_mid.1"])["resid_mid.1"]
    after = run(model, ["resid_mid.1"], {"resid_mid.1": lambda value: DELTA})["resid_mid.1"]
    torch.testing.assert_close(after, before + DELTA)


class ZeroInVector(Gated):
    """A vector of factors of which one is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(32))


def test_a_stream_that_cannot_be_reached_through_a_term_is_not_edited() -> None:
    model = Model(ZeroInVector)
    with torch.no_grad():
        model.blocks[1].gate[3] = 0.0
    is_refused(model, "resid_mid.1", "identity 'edit' misses by")
    assert "resid_mid.0" in map(str, dissect(model).taps)


class UsesAttentionTwice(Plain):
    """The MLP sees what attention returned beside the stream."""

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention(self.norm(x))
        x = x + attention
        return x + self.mlp(self.norm_2(x) + attention)


def test_a_term_that_acts_beside_the_stream_does_not_stand_for_it() -> None:
    is_refused(Model(UsesAttentionTwice), "resid_mid.1", "identity 'edit' misses by")


class MlpFirst(Plain):
    """The MLP comes before attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return x + self.attention(self.norm_2(x))


def test_an_mlp_before_the_mixer_is_not_parallel_to_it() -> None:
    model = Model(MlpFirst)
    is_refused(model, "resid_mid.1", "the MLP comes before the mixer")
    assert not dissect(model).blocks[1].is_parallel


# ---- heads


class SharedKeys(Attention):
    """Values are the keys."""

    def z(self, x: Tensor) -> Tensor:
        q, k = self.split(self.q(x)), self.split(self.k(x))
        return functional.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2)


class WithSharedKeys(Plain):
    """Attention whose values are its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SharedKeys()


def test_values_that_are_the_keys_are_neither() -> None:
    model = Model(WithSharedKeys)
    is_refused(model, "v.1", "no module output holds the v heads")
    is_refused(model, "k.1", "no module output holds the k heads")
    assert "q.1" in map(str, dissect(model).taps)


class SwapsTwoHeads(Attention):
    """Heads 2 and 3 change places after attention."""

    def z(self, x: Tensor) -> Tensor:
        return super().z(x)[:, :, [0, 1, 3, 2]]


class WithSwappedHeads(Plain):
    """Attention whose third and fourth heads change places."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SwapsTwoHeads()


def test_heads_between_those_that_are_halved_one_by_one_are_checked_too() -> None:
    is_refused(Model(WithSwappedHeads), "z.1", "head order|head causality|are no heads")


def test_values_from_which_the_mask_is_made_are_tapped_where_they_are_values_alone() -> None:
    model = built("doge")  # its mask is computed from the values
    anatomy = dissect(model)
    assert anatomy.tap("v.1").point.side == "seam"
    assert anatomy.is_whole


# ---- experts


class TopKActivation(Mlp):
    """A dense MLP that keeps its largest neurons."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        largest = h.topk(6, dim=-1)
        return self.down(torch.zeros_like(h).scatter(-1, largest.indices, largest.values))


class Sparse(Plain):
    """A block with it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = TopKActivation()


def test_a_dense_mlp_that_keeps_its_largest_neurons_has_no_router() -> None:
    anatomy = dissect(Model(Sparse))
    assert not any(site.kind == "router" for site in (*anatomy.taps, *anatomy.unavailable))


class Router(nn.Module):
    """Logits, and what is chosen from them; perhaps also a gate computed from its input."""

    def __init__(self, experts: int, *, gate: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 32))
        self.gate = nn.Parameter(torch.randn(1, 32)) if gate else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        logits = x @ self.weight.T
        chosen = logits.softmax(-1).topk(2, dim=-1)
        gate = 1.0 if self.gate is None else torch.sigmoid(x @ self.gate.T)
        return logits, chosen.values, chosen.indices, gate


class Experts(nn.Module):
    """Experts chosen by a router."""

    experts, gate = 4, False

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(self.experts, gate=self.gate)
        self.each = nn.ModuleList([Mlp() for _ in range(self.experts)])

    def forward(self, x: Tensor) -> Tensor:
        _, weights, indices, gate = self.router(x)
        all_of_them = torch.stack([expert(x) for expert in self.each], -2)
        chosen = all_of_them.gather(-2, indices[..., None].expand(*indices.shape, 32))
        return gate * (weights[..., None] * chosen).sum(-2)


def with_experts(count: int, *, gate: bool) -> nn.Module:
    """A model of blocks with experts."""
    kind = type("Chosen", (Experts,), {"experts": count, "gate": gate})

    class Block(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = kind()

    return Model(Block)


def test_logits_of_a_router_of_our_own() -> None:
    model = with_experts(4, gate=False)
    delta = torch.randn(4)
    before = run(model, ["router.1"])["router.1"]
    after = run(model, ["router.1"], {"router.1": lambda value: delta})["router.1"]
    torch.testing.assert_close(after, before + delta, rtol=1e-4, atol=1e-4)


def test_a_router_that_uses_its_input_for_more_is_not_edited_there() -> None:
    assert not any(site.kind == "router" for site in dissect(with_experts(4, gate=True)).sites)


def test_more_experts_than_width_cannot_be_set_through_the_input() -> None:
    is_refused(with_experts(40, gate=False), "router.1", "router's input, 32 wide, for 40 experts")


# ---- gradients


def test_a_sum_of_two_modules_gives_its_gradient() -> None:
    model = built("granitemoehybrid")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with taps(model, [Read("mlp_out.1", keep_graph=True), Read("resid_post.2", keep_graph=True)]) as tape:
        model(input_ids=IDS, use_cache=False)
    (gradient,) = torch.autograd.grad(tape["resid_post.2"].pow(2).sum(), tape["mlp_out.1"])
    step = 1e-3 * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))

    def loss(delta: Tensor) -> float:
        return float(run(model, ["resid_post.2"], {"mlp_out.1": lambda value: delta})["resid_post.2"].pow(2).sum())

    slope = (loss(step) - loss(-step)) / 2
    assert slope == pytest.approx(float((gradient * step).sum()), rel=2e-2)


def test_two_backwards_through_an_edited_router() -> None:
    model = built("mixtral")
    delta = torch.zeros(4, requires_grad=True)
    with taps(model, "mlp_out.1", {"router.1": lambda value: delta.expand_as(value)}) as tape:
        for _ in range(2):
            model(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert len(tape.all("mlp_out.1")) == 2
    assert delta.grad is not None


# ---- factors of one, models with less than usual, and what is said of them


class LayerScale(Plain):
    """A vector of factors that is one at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attention(self.norm(x))
        return x + self.mlp(self.norm_2(x))


def test_a_vector_of_ones_is_a_factor_all_the_same() -> None:
    model = Model(LayerScale)
    with torch.no_grad():
        for block in model.blocks:
            block.scale.fill_(1.0)
    anatomy = dissect(model)
    assert anatomy.tap("attn_out.1").vectors == ("blocks.1.scale",)
    assert anatomy.tap("head_out.1").vectors == ("blocks.1.scale",)


def test_what_heads_write_counts_with_the_factor_of_their_term() -> None:
    model = built("granite multipliers")
    anatomy = dissect(model)
    assert anatomy.tap("head_out.1").factor == anatomy.tap("attn_out.1").factor == pytest.approx(0.7)
    tape = run(model, ["resid_pre.1", "head_out.1", "resid_mid.1"])
    written = 0.7 * tape["head_out.1"].sum(2)
    torch.testing.assert_close(tape["resid_pre.1"] + written, tape["resid_mid.1"])


def test_heads_before_a_norm_of_their_branch_have_no_factor() -> None:
    assert dissect(built("gemma2")).tap("head_out.1").factor == 1.0


class WithoutMask(Model):
    """A forward of token ids alone."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.through(self.embed(input_ids)))


class WithoutEmbeddings(nn.Module):
    """Does not tell its token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(Plain)
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model(input_ids, attention_mask)


def test_what_a_model_lacks_is_named() -> None:
    with pytest.raises(NotDissectable, match="takes no attention_mask"):
        dissect(WithoutMask(Plain))
    with pytest.raises(NotDissectable, match=r"has no get_input_embeddings\(\)"):
        dissect(WithoutEmbeddings())


def test_names_without_a_layer_and_kinds_that_are_rare() -> None:
    anatomy = dissect(Model(Plain))
    with pytest.raises(KeyError, match=r"z stands for every layer; name one, such as 'z\.0'"):
        anatomy.tap("z")
    with pytest.raises(KeyError, match="router is offered where an MLP chooses experts"):
        anatomy.tap("router.1")


def test_a_tape_holds_its_sites() -> None:
    tape = run(Model(Plain), ["z.1", "resid_post"])
    assert "z.1" in tape
    assert "z.2" not in tape
    assert [str(site) for site in tape] == ["z.1", "resid_post.0", "resid_post.1", "resid_post.2"]
    assert len(tape) == 4
