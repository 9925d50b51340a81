"""Fused operations with a hand-written backward pass, each one node of the autograd graph.

The MLP pays where numpy is faster (tanh); with relu, autograd's own nodes are used. They apply where ``is_eager()``;
otherwise callers use ordinary operations with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from ludus.core.errors import UserError

Shape = tuple[int, ...]
PARALLEL = 2**15  # elements from which on torch uses several threads
FEW_THREADS = 4  # with which torch's tanh is still slower than numpy's


def tanh_(x: Tensor) -> Tensor:
    """Compute tanh in place by numpy, which takes a sixth of torch's time on one thread."""
    faster = torch.get_num_threads() <= FEW_THREADS or x.numel() < PARALLEL
    if x.requires_grad or x.dtype != torch.float32 or not x.is_cpu or not faster:
        return torch.tanh_(x)
    array = x.numpy()
    np.tanh(array, out=array)
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": tanh_, "relu": torch.relu_}  # in place


def is_eager() -> bool:
    """Return whether operations run eagerly: no tracing, compilation, functorch, dispatch mode or autocast."""
    return not (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch.is_anomaly_enabled()
        or torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
    )


def gradients(total: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a scalar, as ``torch.autograd.grad`` without its checks, which are slow.

    None for parameters that ``total`` does not depend on.
    """
    if not total.requires_grad:
        raise UserError("The loss does not depend on any trainable parameter, so there is no gradient.")
    found: tuple[Tensor | None, ...] = torch.autograd.Variable._execution_engine.run_backward(
        (total,), (torch.ones_like(total),), False, False, parameters, allow_unreachable=True, accumulate_grad=False
    )
    return found


def mlp(
    x: Tensor, activation: str, depth: int, parameters: Sequence[Tensor], shapes: Sequence[Shape]
) -> tuple[Tensor, ...]:
    """Return the outputs of an MLP for ``x`` ``[…, F]``, reshaped to ``shapes``.

    ``parameters`` are weight and bias of each of ``depth`` hidden layers, then of each output. If gradients are needed,
    ``is_eager()`` must be true.
    """
    recorded = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))
    if recorded and activation == "tanh":  # with relu, autograd's own nodes are faster
        outputs: tuple[Tensor, ...] = _apply(_MLP, x, activation, depth, shapes, *parameters)
        return outputs
    return _run_mlp(x, activation, depth, shapes, parameters)[1]


def _run_mlp(
    x: Tensor, activation: str, depth: int, shapes: Sequence[Shape], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return the input of each layer as ``[N, …]``, and the outputs."""
    activate_ = ACTIVATIONS[activation]
    inputs = [x.reshape(-1, x.shape[-1])]
    for i in range(0, 2 * depth, 2):
        inputs.append(activate_(functional.linear(inputs[-1], parameters[i], parameters[i + 1])))
    x, start = inputs[-1], 2 * depth
    return inputs, tuple(
        functional.linear(x, parameters[start + 2 * i], parameters[start + 2 * i + 1]).view(shape)
        for i, shape in enumerate(shapes)
    )


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: str, depth: int, shapes: Sequence[Shape], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, outputs = _run_mlp(x, activation, depth, shapes, parameters)
        ctx.settings = activation, depth, shapes
        ctx.save_for_backward(x, *parameters, *inputs)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        (activation, depth, shapes), (by_x, _, _, _, *by_parameters) = ctx.settings, ctx.needs_input_grad
        x, *saved = ctx.saved_tensors
        parameters, inputs = saved[: len(by_parameters)], saved[len(by_parameters) :]
        if torch.is_grad_enabled():
            outputs = _run_mlp(x, activation, depth, shapes, parameters)[1]
            found = _differentiable_gradients(outputs, (x, *parameters), (by_x, *by_parameters), gradients)
            return found[0], None, None, None, *found[1:]
        weights = parameters[::2]
        found = [None] * len(by_parameters)
        learns = any(by_parameters)
        total: Tensor | None = None  # the gradient with respect to the last hidden layer's output
        for i, gradient in enumerate(gradients, depth):
            if gradient is None:
                continue
            gradient = gradient.reshape(len(inputs[depth]), -1)
            if learns:
                found[2 * i], found[2 * i + 1] = torch.mm(gradient.t(), inputs[depth]), gradient.sum(0)
            if depth or by_x:
                total = torch.mm(gradient, weights[i]) if total is None else torch.addmm(total, gradient, weights[i])
        for i in reversed(range(depth if total is not None else 0)):
            total = torch.ops.aten.tanh_backward.default(total, inputs[i + 1])
            if learns:
                found[2 * i], found[2 * i + 1] = torch.mm(total.t(), inputs[i]), total.sum(0)
            if i or by_x:
                total = torch.mm(total, weights[i])
        by_x = total.reshape(x.shape) if by_x and total is not None else None
        return by_x, None, None, None, *found


def _differentiable_gradients(
    outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], needed: tuple[bool, ...], gradients: tuple[Any, ...]
) -> list[Tensor | None]:
    """Return the gradients by those ``inputs`` that are ``needed``, with a graph, for second derivatives."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    found = iter(
        torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if need else None for need in needed]


def _apply(function: type[torch.autograd.Function], *given: Any) -> Any:
    """Call ``function.apply`` without its check for functorch, which ``is_eager`` has made."""
    return super(torch.autograd.Function, function).apply(*given)  # type: ignore[misc]


def categorical_terms(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(action) and the entropy −Σ p log p for ``logits`` ``[…, K]``."""
    if is_eager():
        log_prob, entropy = _apply(_CategoricalTerms, logits, action)
        return log_prob, entropy
    return _plain_terms(logits, action)


def _plain_terms(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


class _CategoricalTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_p = logits.log_softmax(-1)
        p, chosen = log_p.exp(), action.unsqueeze(-1)
        entropy = (p * log_p).sum(-1).neg_()
        ctx.save_for_backward(logits, action, log_p, p, entropy)
        ctx.set_materialize_grads(False)
        return log_p.gather(-1, chosen).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, by_log_prob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, None]:
        logits, action, log_p, p, entropy = ctx.saved_tensors
        if torch.is_grad_enabled():
            outputs = _plain_terms(logits, action)
            return _differentiable_gradients(outputs, (logits,), (True,), (by_log_prob, by_entropy))[0], None
        gradient: Tensor | None = None
        if by_log_prob is not None:  # ∂log p(a)/∂logits = onehot(a) − p
            slope = by_log_prob.unsqueeze(-1)
            gradient = (p * -slope).scatter_add_(-1, action.unsqueeze(-1), slope)
        if by_entropy is not None:  # ∂H/∂logits = −p (log p + H)
            more = p * (log_p + entropy.unsqueeze(-1)) * -by_entropy.unsqueeze(-1)
            gradient = more if gradient is None else gradient.add_(more)
        return gradient, None
