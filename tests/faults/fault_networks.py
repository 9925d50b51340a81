"""Networks with one fault each, named on the command line as ``fault_networks:Name``."""

import torch
from torch import nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, SubModule


class Good(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.layer = nn.Linear(inputs["observation"][0], 8)

    def forward(self, observation):
        return self.layer(observation)


class WrongArguments(nn.Module):
    def forward(self, picture, sound):
        return picture


class WrongShape(Good):
    def forward(self, observation):
        return self.layer(observation).sum()


class WrongOutputs(Good):
    def forward(self, observation):
        return {"policy/action": torch.zeros(len(observation), 7), "value": torch.zeros(len(observation), 1)}


class TextOutputs(Good):
    def forward(self, observation):
        return {"policy/action": "left", "value": "high"}


class NoTensor(Good):
    def forward(self, observation):
        return "left"


class Fails(Good):
    def forward(self, observation):
        return self.layer(observation[:, :1])


class FailsWhenMade(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        raise KeyError("camera")


class ManyArguments(nn.Module):
    def __init__(self, inputs, outputs, depth):
        super().__init__()


class NoModule:
    pass


class OwnWrongOutputs(Network):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, observation, state, first):
        return {"value": torch.zeros(*first.shape, 3)}, state


class OwnNoState(OwnWrongOutputs):
    def forward(self, observation, state, first):
        return {"value": torch.zeros(*first.shape, 1)}


class OwnFails(OwnWrongOutputs):
    def forward(self, observation, state, first):
        raise RuntimeError("sizes differ")


class OwnFailsWhenMade(Network):
    def __init__(self, inputs, outputs):
        super().__init__()
        raise ValueError("no camera")

    def forward(self, observation, state, first):
        return {}, state


class NoPiece:
    dim = 1


class FailingPiece(SubModule):
    dim = 1

    def __init__(self, input_shape, config):
        raise ValueError("three inputs wanted")


class WrongPiece(SubModule):
    """Says that it gives 5 numbers, and gives as many as it got."""

    dim = 1

    def __init__(self, input_shape, config):
        super().__init__(input_shape)

    def output_shape(self, dim=None):
        return (5,)

    def forward(self, x, state, first):
        return x, HiddenState()


no_class = 3
