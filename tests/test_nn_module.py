"""Module: the tree that is found by walking, names, modes, state, paths in the graph, copies."""

import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest

from tinygrad_qkv import Tensor, nn, no_grad
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import optim


class Pair(nn.Module):
    """Two layers in attributes, three in containers, and no call of super().__init__()."""

    def __init__(self):
        self.first = nn.Linear(3, 5)
        self.scale = nn.Parameter(np.float32(2.0))
        self.note = "not a layer"
        self.table = Tensor([1.0], requires_grad=True)  # a tensor alone is no parameter
        self.rows = [nn.Linear(5, 5, bias=False), (nn.Linear(5, 7),)]
        self.by_name = {"a": nn.Parameter([1.0, 2.0]), "b": {"c": nn.LayerNorm(7)}}

    def forward(self, x):
        x = self.rows[0](self.first(x)) * self.scale
        return self.by_name["b"]["c"](self.rows[1][0](x))


class Tied(nn.Module):
    """One matrix as embedding and as read-out."""

    def __init__(self):
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


NAMES = [
    *("first.weight", "first.bias", "scale", "rows.0.weight", "rows.1.0.weight", "rows.1.0.bias"),
    *("by_name.a", "by_name.b.c.weight", "by_name.b.c.bias"),
]


def test_members_are_found_in_attributes_and_containers():
    pair = Pair()
    assert [name for name, _ in pair.named_parameters()] == NAMES
    modules = [path for path, _ in pair.named_modules()]
    assert modules == ["", "first", "rows.0", "rows.1.0", "by_name.b.c"]
    assert next(pair.parameters()) is pair.first.weight and len(list(pair.modules())) == 5
    pair.later = nn.Linear(2, 2)
    del pair.first
    names = [name for name, _ in pair.named_parameters()]
    assert names[0] == "scale" and names[-1] == "later.bias"


def test_a_parameter_copies_its_data_and_requires_grad():
    array = np.ones(3)
    p = nn.Parameter(array)
    array[0] = 9
    assert p.requires_grad and p.is_leaf and p.data[0] == 1 and p.dtype == np.float64
    assert nn.Parameter([1.0]).dtype == np.float32 and not nn.Parameter([1.0], requires_grad=False).requires_grad
    with pytest.raises(TypeError, match="float32 and float64"):
        nn.Parameter([1, 2])


def test_a_module_without_forward_says_so():
    with pytest.raises(NotImplementedError, match="Module defines no forward"):
        nn.Module()(1)


def test_modes_reach_the_whole_tree():
    model = nn.Sequential(nn.Dropout(0.5), Pair())
    assert model.training
    assert model.eval() is model and not any(m.training for m in model.modules())
    assert model.train() is model and all(m.training for m in model.modules())


def test_zero_grad():
    pair = Pair()
    pair(np.ones((2, 3), np.float32)).sum().backward()
    assert pair.first.weight.grad is not None
    pair.zero_grad()
    assert all(p.grad is None for p in pair.parameters())


def test_tied_weights_are_listed_once_and_collect_both_gradients():
    tied = Tied()
    assert [name for name, _ in tied.named_parameters()] == ["embed.weight"]
    assert list(tied.state_dict()) == ["embed.weight"] and tied.tied_names() == {"head.weight": "embed.weight"}
    tied(np.array([2])).sum().backward()
    row, total = tied.embed.weight.data[2], tied.embed.weight.data.sum(0)
    expected = np.tile(row, (7, 1))
    expected[2] += total
    np.testing.assert_allclose(tied.embed.weight.grad, expected, rtol=1e-5)


def test_a_module_in_two_places_and_a_child_that_knows_its_parent():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, shared)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert model.tied_names() == {"1.weight": "0.weight", "1.bias": "0.bias"}
    model.load_state_dict({**model.state_dict(), "1.bias": model.state_dict()["0.bias"]})
    child = nn.Linear(2, 3)
    child.parent = parent = nn.Sequential(child)
    assert len(list(parent.modules())) == 2 and parent.train() is parent
    assert [name for name, _ in parent.named_parameters()] == ["0.weight", "0.bias"]


# ---- state


def test_state_is_a_copy_and_loading_copies():
    a, b = Pair(), Pair()
    state = a.state_dict()
    assert list(state) == NAMES and not any(t.requires_grad for t in state.values())
    a.rows[0].weight.data[:] = 0
    assert (state["rows.0.weight"].data != 0).all()
    a.scale.data = np.float32(5.0)
    b.load_state_dict(a.state_dict())
    a.first.weight.data[:] = 0
    assert b.scale.item() == 5 and (b.first.weight.data != 0).all()


def test_a_state_may_be_made_of_the_parameters_themselves():
    a, b = nn.Parameter([1.0]), nn.Parameter([2.0])
    model = nn.Module()
    model.a, model.b = a, b
    model.load_state_dict({"a": b.detach(), "b": a.detach()})
    assert a.item() == 2 and b.item() == 1


def test_an_optimiser_goes_on_with_loaded_values():
    layer = nn.Linear(1, 1)
    opt = optim.SGD(layer.parameters(), lr=1.0)
    weight = layer.weight
    layer.load_state_dict({"weight": np.float32([[7.0]]), "bias": [0.0]})
    layer.weight.grad = Tensor([[2.0]])
    opt.step()
    assert layer.weight is weight and weight.item() == 5


def test_a_state_that_does_not_fit_is_reported_whole_and_changes_nothing():
    pair = Pair()
    before = pair.state_dict()
    state = pair.state_dict()
    del state["scale"], state["rows.0.weight"]
    state |= {"surplus": Tensor([1.0]), "first.bias": Tensor([1.0]), "by_name.a": np.zeros(2)}
    state["first.weight"] = Tensor(np.zeros((5, 3), np.float32))
    with pytest.raises(ValueError) as error:
        pair.load_state_dict(state)
    text = str(error.value)
    assert "missing: scale, rows.0.weight" in text and "unexpected: surplus" in text and "Pair" in text
    assert "first.bias: shape (1,), expected (5,)" in text
    assert "by_name.a: dtype float64, expected float32" in text
    for name, value in pair.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    with pytest.raises(TypeError, match="dict"):
        pair.load_state_dict([1])


def test_a_dtype_may_only_widen():
    layer = nn.Linear(1, 1)
    layer.load_state_dict({"weight": np.float16([[0.5]]), "bias": np.float16([1])})
    assert layer.weight.dtype == np.float32 and layer.weight.item() == 0.5
    with pytest.raises(ValueError, match=r"weight: dtype int64.*\n.*bias: dtype float64"):
        layer.load_state_dict({"weight": np.array([[1]]), "bias": np.array([1.0])})


def test_a_tied_weight_stays_tied_and_comes_under_any_of_its_names():
    tied = Tied()
    new = np.arange(21, dtype=np.float32).reshape(7, 3)
    for i, names in enumerate((["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"])):
        tied.load_state_dict(dict.fromkeys(names, new + i))
        assert tied.head.weight is tied.embed.weight
        np.testing.assert_array_equal(tied.embed.weight, new + i)
    with pytest.raises(ValueError, match=r"head\.weight: is tied"):
        tied.load_state_dict({"embed.weight": new, "head.weight": new + 1})
    new[0] = np.nan  # equals itself here
    tied.load_state_dict({"embed.weight": new, "head.weight": new})


def test_backward_refuses_weights_that_were_loaded_in_between():
    layer = nn.Linear(2, 3)
    y = layer(Tensor(np.ones((1, 2), np.float32), requires_grad=True)).sum()
    layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


def test_two_parameters_of_one_name_are_refused():
    model = nn.Module()
    model.a = {"b.c": nn.Parameter([1.0]), "b": {"c": nn.Parameter([2.0])}}
    with pytest.raises(ValueError, match=r"the name 'a\.b\.c'"):
        model.state_dict()


# ---- paths in the graph


def ops_below(node, found):
    found.append(node)
    for parent in node.parents:
        if hasattr(parent, "parents"):
            ops_below(parent, found)
    return found


class Stack(nn.Module):
    def __init__(self):
        self.blocks = nn.ModuleList([nn.TransformerBlock(4, 2, 3) for _ in range(2)])
        self.loose = (lambda layer: lambda x: layer(x))(nn.Linear(4, 4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.loose(x)


def test_every_op_knows_the_module_that_it_was_made_in():
    model = Stack()
    y = model(np.ones((1, 3, 4), np.float32))
    nodes = ops_below(y._node, [])
    paths = {node.frame.path for node in nodes if node.frame}
    assert {"blocks.0.attn", "blocks.1.attn", "blocks.1.norm2", "blocks.0.feed.up", "blocks.1", "Linear"} <= paths
    frame = next(node.frame for node in nodes if node.frame and node.frame.path == "blocks.1.feed.up")
    assert frame.kind == "Linear" and frame.parent.kind == "FeedForward" and frame.parent.parent.path == "blocks.1"
    assert frame.parent.parent.parent.path == "" and frame.parent.parent.parent.parent is None
    assert frame.number > frame.parent.number
    assert model.blocks[1].attn.W_Q.name == "blocks.1.attn.W_Q"
    assert {"blocks.0.attn.W_K", "blocks.1.feed.down.bias"} <= {node.name for node in nodes}


def test_each_call_of_one_module_has_its_own_frame():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, layer)
    nodes = ops_below(model(np.ones((2, 3), np.float32))._node, [])
    assert {node.frame.path for node in nodes if node.frame} == {"0"}
    assert len({node.frame.number for node in nodes if node.frame}) == 2


def test_paths_end_with_the_call_also_after_an_error_and_in_other_threads():
    class Failing(nn.Module):
        def forward(self, x):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        nn.Sequential(Failing())(1)
    x = Tensor([1.0], requires_grad=True)
    assert (x * 2)._node.frame is None
    found = []

    class Threaded(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=lambda: found.append((x * 2)._node.frame))
            thread.start()
            thread.join()
            return x * 2

    assert Threaded()(x)._node.frame.kind == "Threaded" and found == [None]


# ---- copies and display


def test_copies_are_independent_and_keep_ties():
    for clone in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        tied = Tied()
        tied.embed.weight.requires_grad = False
        twin = clone(tied)
        assert twin.head.weight is twin.embed.weight and twin.embed.weight is not tied.embed.weight
        assert isinstance(twin.embed.weight, nn.Parameter) and not twin.embed.weight.requires_grad
        twin.embed.weight.data[:] = 0
        assert (tied.embed.weight.data != 0).any()


def test_a_model_in_float64():
    tied = Tied()
    weight = tied.embed.weight
    assert tied.astype("float64") is tied and tied.head.weight is weight and weight.dtype == np.float64
    weight.requires_grad = False
    assert not tied.astype("float32").embed.weight.requires_grad
    with pytest.raises(TypeError, match="float32 or float64"):
        tied.astype("int64")


def test_repr_shows_the_tree_with_shapes_and_counts():
    lines = repr(nn.Sequential(nn.Linear(3, 5), F.relu, nn.Dropout(0.1))).splitlines()
    assert lines == [
        "Sequential  [20]",
        "  0: Linear  weight (5, 3), bias (5,)  [20]",
        "  2: Dropout(p=0.1)  [0]",
    ]
    assert repr(Tied()).splitlines()[0] == "Tied  [21]"


def test_calls_work_under_no_grad():
    with no_grad():
        y = Pair()(np.ones((2, 3), np.float32))
    assert not y.requires_grad


def test_a_dropped_model_is_freed_by_reference_counting():
    """Also after a call and a walk over its tree, which must leave no cycle that holds the parameters."""
    model = Pair()
    model(Tensor(np.ones((2, 3), np.float32))).sum().backward()
    weight = weakref.ref(model.first.weight)
    gc.collect()
    gc.disable()
    try:
        model(Tensor(np.ones((2, 3), np.float32)))
        model.state_dict()
        del model
        assert weight() is None, "a cycle keeps the parameters"
    finally:
        gc.enable()


def test_a_tree_deeper_than_the_recursion_limit():
    model = nn.Linear(2, 2)
    for _ in range(1500):
        model = nn.Sequential(model)
    assert [p.shape for p in model.parameters()] == [(2, 2), (2,)]
    assert next(iter(model.state_dict())) == "0." * 1500 + "weight"


def test_dir_leaves_out_what_leads_elsewhere():
    listed, of_tensor = dir(nn.Linear(2, 3)), dir(Tensor([1.0]))
    assert "weight" in listed and "named_parameters" in listed and "register_buffer" not in listed
    assert "permute" in of_tensor and "__add__" in of_tensor and "clamp" not in of_tensor
