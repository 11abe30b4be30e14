import asyncio
import copy
import pickle
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from microtome.capture import hooks
from microtome.capture.anatomy import Anatomy, Point, Tap
from microtome.capture.attention_seam import seam_configs
from microtome.capture.hooks import attach, detach
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps

DELTA = torch.linspace(-1, 1, 32)


def state_of(model):
    """Everything that taps could leave behind on a model."""
    dicts = [name for name in vars(nn.Module()) if "hook" in name]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return {
        "tree": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [{d: list(getattr(m, d).items()) for d in dicts if getattr(m, d)} for m in model.modules()],
        "forwards": [id(module.forward.__func__) for module in model.modules()],
        "weights": [(name, tensor.data_ptr()) for name, tensor in model.state_dict().items()],
        "settings": [(type(c._attn_implementation), str(c._attn_implementation)) for c in configs.values()],
        "configurations": [c.to_dict() for c in configs.values()],
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_detach_leaves_the_model_as_it_was(tappable, forward, tmp_path, kind):
    model, anatomy = tappable(kind)
    own_hook = model.get_submodule(anatomy.blocks[0].path).register_forward_hook(lambda module, args, output: None)
    model.save_pretrained(tmp_path / "before")  # saving notes the architecture in the configuration
    bare, before = forward(model), state_of(model)
    attach(model, anatomy)
    assert state_of(model) != before
    assert torch.equal(forward(model), bare)
    with taps(model, ["z", "resid_post"], {"resid_mid.1": torch.zeros_like}, anatomy=anatomy):
        forward(model)
    model.save_pretrained(tmp_path / "attached")
    detach(model)
    assert state_of(model) == before
    assert torch.equal(forward(model), bare)
    assert seam_configs(model) == []
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "attached" / file).read_bytes() == (tmp_path / "before" / file).read_bytes()
    own_hook.remove()
    detach(model)  # nothing to take out is no error


def test_hooks_are_set_once_and_taps_work_again_after_detach(tappable, forward):
    model, anatomy = tappable("llama")
    attach(model, anatomy)
    once = state_of(model)
    attach(model, anatomy)
    for _ in range(3):
        with taps(model, ["z.1"], {"resid_post.1": torch.zeros_like}, anatomy=anatomy) as tape:
            forward(model)
    assert state_of(model) == once
    detach(model)
    with taps(model, ["z.1"], {"resid_post.1": torch.zeros_like}, anatomy=anatomy) as again:
        forward(model)
    assert torch.equal(again["z.1"], tape["z.1"])


def test_detach_inside_a_context_is_refused(tappable, forward):
    model, anatomy = tappable("llama")
    with taps(model, ["z.1"], anatomy=anatomy):
        with pytest.raises(RuntimeError, match="leave the context first"):
            detach(model)
        forward(model)
    detach(model)


def test_a_copy_made_while_attached_can_be_detached_and_pickled(tappable, forward):
    model, anatomy = tappable("llama")
    bare, before = forward(model), state_of(model)
    attach(model, anatomy)
    twin = copy.deepcopy(model)
    assert torch.equal(forward(twin), bare)
    assert torch.equal(forward(pickle.loads(pickle.dumps(model))), bare)
    detach(twin)
    assert state_of(twin)["hooks"] == before["hooks"]
    assert state_of(twin)["settings"] == before["settings"]


def test_a_copy_that_is_tapped_fires_once_per_call(tappable, forward):
    model, anatomy = tappable("llama")
    attach(model, anatomy)
    twin = copy.deepcopy(model)
    attach(twin, anatomy)
    with taps(twin, ["resid_post.1"], {"resid_post.1": lambda value: DELTA}, anatomy=anatomy) as tape:
        forward(twin)
    assert set(tape.firings.values()) == {1}


@pytest.mark.parametrize("site", ["resid_post.0", "z.1", "q_rot.1", "mlp_act.1"])
def test_an_exception_in_an_edit_comes_out_and_switches_everything_off(tappable, forward, site):
    model, anatomy = tappable("llama")
    bare = forward(model)

    def fails(value):
        raise ZeroDivisionError("in the edit")

    for _ in range(2):
        with (
            pytest.raises(ZeroDivisionError, match="in the edit"),
            taps(model, ["resid_post.2"], {site: fails}, anatomy=anatomy),
        ):
            forward(model)
        assert torch.equal(forward(model), bare)


def test_an_exception_caught_inside_leaves_the_context_on(tappable, forward):
    model, anatomy = tappable("llama")
    calls = []

    def fails_once(value):
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        return DELTA

    with taps(model, ["resid_post.2"], {"resid_post.0": fails_once}, anatomy=anatomy) as tape:
        with pytest.raises(ZeroDivisionError):
            forward(model)
        forward(model)
    assert tape.firings == {Site("resid_post", 0): 1, Site("resid_post", 2): 1}


def test_an_edit_may_run_the_model_itself(tappable, forward):
    model, anatomy = tappable("llama")
    clean = []

    def difference_to_clean(value):
        if not clean:  # the inner run comes here too, since the edit acts in it
            clean.append(None)
            with taps(model, ["resid_post.2"], anatomy=anatomy) as inner:
                forward(model)
            clean[0] = inner["resid_post.2"]
        return torch.zeros_like(value)

    with taps(model, edits={"resid_post.0": difference_to_clean}, anatomy=anatomy) as tape:
        forward(model)
    assert tape.firings == {Site("resid_post", 0): 2}
    assert clean[0].shape == (2, 9, 32)


def test_threads_do_not_see_each_others_taps(tappable, forward):
    """Clean and edited forwards of one model side by side, hundreds of each; hooks are set while both run."""
    model, anatomy = tappable("llama")
    bare = forward(model)
    with taps(model, edits={"resid_post.0": lambda value: DELTA, "z.1.2": torch.neg}, anatomy=anatomy):
        steered = forward(model)
    detach(model)
    runs, wrong, barrier = 300, [], threading.Barrier(3)

    def work(name, expected, context):
        barrier.wait()
        for _ in range(runs):
            with context():
                output = forward(model)
            if not torch.equal(output, expected):
                wrong.append(name)

    def edited():
        return taps(model, edits={"resid_post.0": lambda value: DELTA, "z.1.2": torch.neg}, anatomy=anatomy)

    def read():
        return taps(model, ["z", "resid_post", Read("pattern.1", queries=[-1])], anatomy=anatomy)

    threads = [
        threading.Thread(target=work, args=("clean", bare, torch.no_grad)),
        threading.Thread(target=work, args=("edited", steered, edited)),
        threading.Thread(target=work, args=("read", bare, read)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.equal(forward(model), bare)


def test_a_hook_that_another_thread_is_just_setting_is_inert(tappable, forward):
    # torch stores a hook before it notes that it wants keyword arguments; a forward in between calls it without.
    model, anatomy = tappable("llama")
    bare = forward(model)
    model.model.layers[1].register_forward_hook(hooks._after)
    model.model.layers[1].register_forward_pre_hook(hooks._before)
    assert torch.equal(forward(model), bare)
    with taps(model, ["resid_post.0"], anatomy=anatomy):
        assert torch.equal(forward(model), bare)


def test_asyncio_tasks_do_not_see_each_others_taps(tappable, forward):
    model, anatomy = tappable("gpt2")
    bare = forward(model)

    async def clean():
        outputs = []
        for _ in range(5):
            await asyncio.sleep(0)
            outputs.append(forward(model))
        return outputs

    async def edited():
        with taps(model, edits={"resid_post.0": lambda value: DELTA}, anatomy=anatomy):
            return await clean()

    async def both():
        return await asyncio.gather(clean(), edited(), clean())

    first, steered, last = asyncio.run(both())
    assert all(torch.equal(output, bare) for output in first + last)
    assert not any(torch.allclose(output, bare) for output in steered)


# ---- what modules take and return


class InPlace(nn.Module):
    """Like Falcon: the MLP's output tensor is added into, so that a reference to it becomes the sum."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        mlp = self.mlp(x)
        mlp += self.attention(x)
        return x + mlp


Pair = namedtuple("Pair", "stream extra")


@dataclass
class Output(ModelOutput):
    stream: torch.Tensor | None = None
    extra: torch.Tensor | None = None


class Returns(nn.Module):
    """Returns its stream in whatever `form` makes of it."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = nn.Linear(4, 4), form

    def forward(self, x):
        return self.form(self.inner(x))


class Outer(nn.Module):
    """Calls its block and hands on what it returned, so that a test can look at the type."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs)


def numbered(path, side, slot, calls):
    """`resid_post.0` at each of some calls of one module."""
    sites = [Site("resid_post", 0, call=n) for n in range(calls)]
    return Anatomy("Toy", (), 4, {site: Tap(site, Point(path, side, slot, site.call), width=4) for site in sites})


def one_tap(path, side, slot):
    return Anatomy("Toy", (), 4, {Site("resid_post", 0): Tap(Site("resid_post", 0), Point(path, side, slot), width=4)})


FORMS = {
    "tensor": (lambda x: x, None),
    "tuple": (lambda x: (torch.ones(1), x, None), 1),
    "list": (lambda x: [x, "other"], 0),
    "named tuple": (lambda x: Pair(x, 3), 0),
    "model output": (lambda x: Output(stream=x, extra=2 * x), "stream"),
    "dict": (lambda x: OrderedDict(stream=x, extra=2), "stream"),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_keep_their_type_and_change_in_one_element(form):
    make, slot = FORMS[form]
    model, x, delta = Outer(Returns(make)), torch.randn(3, 5, 4), torch.tensor([1.0, 2, 3, 4])
    anatomy = one_tap("block", "out", slot)
    bare = model(x)
    with taps(model, ["resid_post.0"], anatomy=anatomy) as tape:
        read = model(x)
    with taps(model, edits={"resid_post.0": lambda value: delta}, anatomy=anatomy):
        edited = model(x)
    assert type(read) is type(edited) is type(bare)

    def element(output):
        return output if slot is None else output[slot]

    torch.testing.assert_close(tape["resid_post.0"], element(bare))
    torch.testing.assert_close(element(edited), element(bare) + delta)
    if slot is not None:
        keys = bare.keys() if hasattr(bare, "keys") else range(len(bare))
        for key in set(keys) - {slot}:
            same = edited[key] is bare[key] if not isinstance(bare[key], torch.Tensor) else edited[key].equal(bare[key])
            assert same or isinstance(bare[key], (str, int))


@pytest.mark.parametrize(
    ("slot", "call"),
    [(1, lambda m, a, b: m(a, b)), ("x2", lambda m, a, b: m(a, x2=b)), ("x2", lambda m, a, b: m(x1=a, x2=b))],
)
def test_arguments_are_found_by_place_or_keyword(slot, call):
    class Sum(nn.Module):
        def forward(self, x1, x2):
            return 10 * x1 + x2

    model, delta = Outer(Sum()), torch.arange(4.0)
    a, b = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    with taps(
        model, ["resid_post.0"], {"resid_post.0": lambda value: delta}, anatomy=one_tap("block", "in", slot)
    ) as tape:
        output = call(model, a, b)
    torch.testing.assert_close(tape["resid_post.0"], b + delta)
    torch.testing.assert_close(output, 10 * a + b + delta)


def test_in_place_adds_after_a_read_do_not_reach_it_and_edits_do_not_write_into_what_the_model_holds():
    model, x = InPlace(), torch.randn(2, 3, 4)
    anatomy = one_tap("mlp", "out", None)
    bare = model(x)
    with taps(model, ["resid_post.0"], anatomy=anatomy) as tape:
        assert torch.equal(model(x), bare)
    assert torch.equal(tape["resid_post.0"], model.mlp(x))
    with taps(model, [Read("resid_post.0", keep_graph=True)], anatomy=anatomy) as tape:
        output = model(x)
    assert torch.equal(tape["resid_post.0"], model.mlp(x))
    (gradient,) = torch.autograd.grad(output.sum(), tape["resid_post.0"])
    assert (gradient == 1).all()
    with taps(model, edits={"resid_post.0": lambda value: -value}, anatomy=anatomy):
        torch.testing.assert_close(model(x), x + model.attention(x))
    given = x.clone()
    with taps(model, edits={"resid_post.0": lambda value: value}, anatomy=one_tap("mlp", "in", 0)):
        model(given)
    assert torch.equal(given, x)


def test_a_call_in_another_form_than_the_anatomy_knows_is_an_error():
    model, x = Outer(Returns(lambda x: (x, None))), torch.randn(2, 3, 4)
    for slot, error, message in [
        (None, TypeError, r"Returns returned a tuple; its tap expects a tensor\. Call"),
        (1, TypeError, r"Returns returned a tuple; its tap expects a tensor as element 1\."),
        ("stream", TypeError, r"Returns returned a tuple; its tap expects a tensor as element 'stream'"),
    ]:
        with pytest.raises(error, match=message), taps(model, ["resid_post.0"], anatomy=one_tap("block", "out", slot)):
            model(x)
    for slot in (1, "hidden"):
        message = rf"Returns was called with 1 positional arguments and \[\]; its tap expects argument {slot!r}"
        with (
            pytest.raises(KeyError, match=message),
            taps(model, ["resid_post.0"], anatomy=one_tap("block", "in", slot)),
        ):
            model(x)


class Careless(nn.Module):
    """Swallows every exception of its block."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        try:
            return self.block(x)
        except Exception:
            return x


def test_a_stop_is_not_swallowed_by_model_code():
    model = Careless()
    with taps(model, ["resid_post.0"], anatomy=one_tap("block", "out", None), stop=True):
        model(torch.randn(2, 3, 4))
        pytest.fail("the block ends with the forward")


class Looped(nn.Module):
    """One block that runs three times, like ALBERT's."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return x


def test_a_numbered_call_is_that_call_of_every_forward():
    model, x, delta = Looped(), torch.randn(2, 3, 4), torch.arange(4.0)
    anatomy = numbered("block", "out", None, 3)
    sites = list(anatomy.taps)
    with taps(
        model, ["resid_post.0@0", "resid_post.0@2"], {"resid_post.0@1": lambda value: delta}, anatomy=anatomy
    ) as tape:
        first = model(x)
        model(x)
    expected = model.block(model.block(model.block(x)) + delta)
    torch.testing.assert_close(first, expected)
    assert tape.firings == dict.fromkeys(sites, 2)
    assert torch.equal(tape.all("resid_post.0@0")[1], model.block(x))
    assert torch.equal(tape.all("resid_post.0@2")[1], first)


def test_calls_are_counted_anew_after_a_forward_that_broke_off():
    model, x = Looped(), torch.randn(2, 3, 4)
    site = Site("resid_post", 0, call=1)
    anatomy = numbered("block", "out", None, 3)

    def fail(module, args):
        raise ZeroDivisionError

    with taps(model, ["resid_post.0@1"], anatomy=anatomy) as tape:
        handle = model.block.register_forward_pre_hook(lambda m, a: fail(m, a) if tape.firings[site] else None)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        model(x)
    assert len(tape.all(site)) == 2
    assert torch.equal(tape.all(site)[0], tape.all(site)[1])
