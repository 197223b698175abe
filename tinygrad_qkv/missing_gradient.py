"""Why a tensor has no gradient, in words."""

from __future__ import annotations

from tinygrad_qkv.tensor import Tensor


def why_no_gradient(tensor: Tensor) -> str:
    """The reason why `tensor.grad` is None, and what to do about it."""
    node = tensor._node
    what = f"this tensor of shape {tensor.shape}" if tensor.name is None else f"{tensor.name!r} of shape {tensor.shape}"
    if tensor.dtype.kind != "f":
        return f"{what} holds {tensor.dtype}: only float tensors have gradients"
    if not tensor.requires_grad:
        while node is not None and node.cut_from and not any(n.requires_grad for n in node.cut_from):
            node = next(n for n in node.cut_from if n.cut_from)  # made from what was cut off before
        if node is not None and node.cut_from:
            where = f" at {node.line}" if node.line else ""
            how = "detach()" if node.op == "detach" else f"op '{node.op}' under no_grad()"
            return (
                f"{what} was cut off from its graph by {how}{where}; what is used after the cut gets no gradient "
                "through it"
            )
        return (
            f"{what} does not require grad: set requires_grad=True before the forward pass; if an op made it, that ran "
            "under no_grad(), on constants or on detach(), and `with recording():` around the forward pass tells where"
        )
    if not tensor.is_leaf and node is not None and node.hooks is not None and node.hooks.keep:
        return (
            f"{what} was made by op '{tensor._op}' and keeps its gradient, but no backward pass has reached it since "
            "that was asked for: call loss.backward(); if you did, the loss does not depend on it"
        )
    if not tensor.is_leaf:
        return (
            f"{what} was made by op '{tensor._op}', and only leaves keep their gradient: call t.retain_grad() before "
            "backward(), or run the forward pass inside `with recording():`"
        )
    return (
        f"{what} is a leaf that no backward pass has reached since its gradient was last cleared: call "
        "loss.backward() first; if you did, the loss does not depend on it, or the way was cut by detach() or no_grad()"
    )
