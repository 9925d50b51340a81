"""A policy whose parts depend on each other: autoregressive parts, and arguments that some choices do not use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.network import Shape
from ludus.core.spec import Specs, mask_name
from ludus.core.types import Tensors
from ludus.networks.action_heads import Parameters
from ludus.networks.init import initialize
from ludus.networks.policy import ActionPart, Policy
from ludus.networks.policy_config import PolicyConfig, parse_arguments, sampling_order
from ludus.networks.projection import output_gain
from ludus.networks.slots import module_key


class Conditioner(nn.Module):
    """From features ``[…, width, *space]`` and the embedding of earlier parts to the output that a head decodes."""

    def __init__(self, width: int, output: Shape) -> None:
        super().__init__()
        self.output = output
        self.last = nn.Linear(width, output[0])

    def hidden(self, features: Tensor, context: Tensor | None) -> Tensor:
        """Return the hidden features, given the sum of the embeddings ``[…, width]``, if there are earlier parts."""
        if context is None:
            return features.relu()
        return (features + context[(..., *[None] * (len(self.output) - 1))]).relu()

    def forward(self, hidden: Tensor) -> Tensor:
        if len(self.output) == 1:
            y: Tensor = self.last(hidden)
            return y
        space = hidden.flatten(1 - len(self.output))  # [..., width, S]
        return torch.unflatten(self.last.weight @ space + self.last.bias.unsqueeze(-1), -1, self.output[1:])


class _Step(NamedTuple):
    """How one part is sampled."""

    part: ActionPart
    conditioner: Any  # None: the network's output goes to the head as it is
    embedding: Any  # of its action, for later parts; None: no later part needs it
    function: str  # the part whose choice decides whether this one is used; empty: it always is


class _Visit(NamedTuple):
    """A part with its distribution and action, all given the parts before it."""

    part: ActionPart
    p: Parameters
    action: Tensor  # flat, as the head uses it


class ConditionalPolicy(Policy):
    """A policy whose parts are sampled one after the other.

    Each part of ``agent.autoregressive`` is given those before it: the network's output is features, to which a learned
    embedding of the earlier parts is added before a hidden layer's activation and a linear layer. A part that the
    choice of another does not use (``agent.arguments``) has the ``unused_value`` of its head, and no log-probability,
    entropy, KL or gradient. Entropy and KL are those of each part given the parts of the action before it, and so is
    its mask, if that depends on one of them.
    """

    def __init__(self, action: Specs, config: PolicyConfig, inputs: Mapping[str, Shape]) -> None:
        super().__init__(action, config, inputs)
        tables, chain, width = parse_arguments(config.arguments, action), config.autoregressive, config.head_width
        order = sampling_order(action, chain, tables)
        functions = {name: function for function, table in tables.items() for name in table}
        for name, used in (argument for table in tables.values() for argument in table.items()):
            self.register_buffer(_table_key(name), torch.tensor(used), persistent=False)
        self.conditioners, self.embeddings = nn.ModuleDict(), nn.ModuleDict()
        self._steps: list[_Step] = []
        self._mask_conditions: dict[str, str] = {}  # part → the part whose choice selects the row of its mask
        parts = {part.name: part for part in self._parts}
        for name in order:
            part, key = parts[name], module_key(name)
            conditioner = embedding = None
            if name in chain[1:] or (name in chain[:-1] and part.head.embeds_entities):
                shape = part.head.output_shape
                conditioner = self.conditioners[key] = Conditioner(width, shape)
                part = part._replace(output=f"features/{name}")
                self.outputs[part.output] = (width, *shape[1:])
                del self.outputs[f"policy/{name}"]
                if f"policy/{name}" in self.over:
                    self.over[part.output] = self.over.pop(f"policy/{name}")
            if name in chain[:-1]:
                embedding = self.embeddings[key] = part.head.make_embedding(width)
            self._steps.append(_Step(part, conditioner, embedding, functions.get(name, "")))
            parts[name] = part
        self._parts = list(parts.values())

    def set_mask_condition(self, name: str, other: str) -> None:
        order = [step.part.name for step in self._steps]
        if order.index(other) >= order.index(name):
            super().set_mask_condition(name, other)
        if self._may_lack(name, other):
            raise UserError(
                f'The mask of action "{name}" depends on the choice of "{other}", which agent.arguments leaves unused '
                f'where "{name}" is used; use "{other}" wherever "{name}" is.'
            )
        self._mask_conditions[name] = other

    def _may_lack(self, name: str, other: str) -> bool:
        """Return whether the part ``name`` may be used where ``other`` is not."""
        functions = {step.part.name: step.function for step in self._steps}
        if not functions[other]:
            return False
        if functions[name] != functions[other]:
            return functions[name] != other  # an argument of ``other`` is used only where that is
        mine, others = (self.get_buffer(_table_key(part)) for part in (name, other))
        return bool((mine & ~others).any())

    def initialize(self) -> None:
        for modules, gain in ((self.conditioners, output_gain("policy")), (self.embeddings, 1.0)):
            for layer in modules.modules():
                if isinstance(layer, nn.Linear):
                    initialize(layer, gain)

    def sample(self, outputs: Tensors, observation: Tensors, noise: Tensors | None) -> tuple[Tensors, Tensor]:
        def choose(part: ActionPart, p: Parameters) -> Tensor:
            return part.head.mode(p) if noise is None else part.head.sample(p, noise[part.name])

        visits = list(self._visit(outputs, observation, choose))
        actions = {v.part.name: v.part.unflatten(v.action) for v in visits}
        return actions, self._sum({v.part.name: v.part.head.log_prob(v.p, v.action) for v in visits}, actions)

    def describe(self, outputs: Tensors, observation: Tensors) -> dict[str, Tensors]:
        """Return each part's distribution, given the most likely choices of the parts before it."""
        visits = self._visit(outputs, observation, lambda part, p: part.head.mode(p))
        described = {visit.part.name: visit.part.head.describe(visit.p) for visit in visits}
        return {name: described[name] for name in self.action}

    def _decode(self, outputs: Tensors, action: Tensors, observation: Tensors) -> list[tuple[ActionPart, Parameters]]:
        visits = self._visit(outputs, observation, lambda part, p: part.flatten(action[part.name]))
        return [(visit.part, visit.p) for visit in visits]

    def _visit(
        self, outputs: Tensors, observation: Tensors, choose: Callable[[ActionPart, Parameters], Tensor]
    ) -> Iterator[_Visit]:
        """Yield the parts in order, each with the action that ``choose`` returns for its distribution."""
        actions: Tensors = {}
        uses: Tensors = {}
        context: Tensor | None = None
        for part, conditioner, embedding, function in self._steps:
            features = outputs[part.output]
            if conditioner is not None:
                features = conditioner.hidden(features, context)
            output = features if conditioner is None else conditioner(features)
            p = part.head.decode(output, self._with_mask(part, actions, observation))
            action, used = choose(part, p), None
            if function:
                used = uses[part.name] = self._is_used(part.name, function, actions, uses)
                extra = [None] * (action.dim() - used.dim())
                action = torch.where(used[(..., *extra)], action, part.head.unused_value)
            actions[part.name] = action
            if embedding is not None:
                embedded = embedding(action, features)
                embedded = embedded if used is None else torch.where(used.unsqueeze(-1), embedded, 0)
                context = embedded if context is None else context + embedded
            yield _Visit(part, p, action)

    def _sum(self, terms: Tensors, action: Tensors) -> Tensor:
        used = self.used_parts(action)
        return super()._sum({k: torch.where(used[k], x, 0) if k in used else x for k, x in terms.items()}, action)

    def used_parts(self, action: Tensors) -> Tensors:
        uses: Tensors = {}
        for part, _, _, function in self._steps:
            if function:
                uses[part.name] = self._is_used(part.name, function, action, uses)
        return uses

    def _is_used(self, name: str, function: str, actions: Tensors, uses: Tensors) -> Tensor:
        """Return where the choice of ``function`` uses an argument; ``uses`` are those of the parts before it."""
        used: Tensor = self.get_buffer(_table_key(name))[actions[function]]
        return used & uses[function] if function in uses else used

    def _with_mask(self, part: ActionPart, actions: Tensors, observation: Tensors) -> Tensors:
        """Return the observation with the mask that applies to a part, given the actions before it."""
        if (other := self._mask_conditions.get(part.name)) is None:
            return observation
        rows, choice = observation[mask_name(part.name, self.action, other)], actions[other]  # [..., n, K], [...]
        mask = rows.gather(-2, choice[..., None, None].expand(*choice.shape, 1, rows.shape[-1])).squeeze(-2)
        return {**observation, part.head.mask: mask}


def make_policy(action: Specs, config: PolicyConfig, inputs: Mapping[str, Shape]) -> Policy:
    """Make the policy for these settings; ``inputs`` are the shapes of the observations as networks get them."""
    dependent = config.autoregressive or config.arguments
    return (ConditionalPolicy if dependent else Policy)(action, config, inputs)


def _table_key(name: str) -> str:
    return f"uses/{module_key(name)}"
