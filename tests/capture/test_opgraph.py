"""The recorded op graph: identity of tensors, in-place ops, module calls, and a model left as it was."""

import torch
from torch import Tensor, nn

from microtome.capture.opgraph import OpGraph, map_tensors


class InPlace(nn.Module):
    """Adds into a tensor of which another module still holds a view."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        view = y.view(-1)
        y += x
        y[0] = 7
        return y, view


def test_values_are_not_rewritten_under_a_node() -> None:
    x = torch.arange(3.0)
    model = InPlace()
    with OpGraph(model) as graph:
        y, view = model(x)
    ops = [node.op for node in graph.nodes]
    assert ops == ["input", "mul", "view", "__iadd__", "alias", "__setitem__", "alias"] or "alias" in ops
    by_op = {node.op: node.value for node in graph.nodes}
    assert by_op["mul"].tolist() == [0, 2, 4]
    assert graph.nodes[graph.calls[0].outputs[0]].value.tolist() == y.tolist() == [7, 3, 6]
    assert graph.nodes[graph.calls[0].outputs[1]].value.tolist() == view.tolist()


def test_a_view_depends_on_what_is_written_into_its_storage() -> None:
    x, other = torch.ones(3), torch.ones(3)

    class Writes(nn.Module):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            y = x * 2
            view = y.view(-1)
            y.add_(other)
            return view * 1

    model = Writes()
    with OpGraph(model) as graph:
        model(x, other)
    call = graph.calls[0]
    assert call.outputs[None] in graph.descendants(call.inputs[1])


def test_calls_nest_and_keep_their_arguments() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"first": self.inner(x), "second": self.inner(input=x) * scale}

    model = Outer()
    x = torch.randn(2, 3)
    with torch.no_grad(), OpGraph(model) as graph:
        model(x, scale=2.0)
    assert [(c.path, c.number, c.parent) for c in graph.calls] == [("", 0, -1), ("inner", 0, 0), ("inner", 1, 0)]
    assert graph.calls[2].inputs.keys() == {"input"}
    assert graph.calls[0].outputs.keys() == {"first", "second"}
    args, kwargs = graph.arguments(graph.calls[0])
    assert torch.equal(args[0], x)
    assert kwargs == {"scale": 2.0}
    assert args[0] is not x


def test_source_goes_back_through_views_and_no_further() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x.view(4).reshape(2, 2), training=False) + 1

    model = Views()
    with OpGraph(model) as graph:
        model(torch.randn(2, 2))
    last = graph.nodes[graph.calls[0].outputs[None]]
    assert graph.source(last.parents[0]) == graph.calls[0].inputs[0]
    assert graph.source(last.index) == last.index


def test_recording_leaves_no_hook_and_no_own_ops(tiny) -> None:
    model = tiny("gpt2")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        before = model(ids).logits
        with OpGraph(model) as graph:
            inside = model(ids).logits
    assert torch.equal(before, inside)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert "detach" not in {node.op for node in graph.nodes}


def test_map_tensors_keeps_the_nesting() -> None:
    tree = ({"a": [torch.ones(1), None]}, (2, "x"))
    doubled = map_tensors(tree, lambda t: t * 2)
    assert doubled[0]["a"][0].tolist() == [2]
    assert doubled[0]["a"][1] is None
    assert doubled[1] == (2, "x")
