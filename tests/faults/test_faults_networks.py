"""Networks that cannot be joined, made or run: all told before training."""

import pytest
from faults_setup import TINY, flags

NETWORKS = {
    "WrongArguments": 'an argument "picture", but no observation has that name',
    "WrongShape": "returned a tensor of shape () for a batch of 2",
    "WrongOutputs": '"policy/action" of shape (2, 7)',
    "TextOutputs": '"policy/action" as str',
    "NoTensor": "returned str",
    "Fails": "fails on a batch of zeros (observation (2, 4))",
    "FailsWhenMade": "cannot be made: KeyError: 'camera'",
    "ManyArguments": "needs 3 arguments",
    "NoModule": "derive it from torch.nn.Module",
    "no_class": "derive it from torch.nn.Module",
    "OwnWrongOutputs": 'not the output "policy/action"',
    "OwnNoState": "must return two values",
    "OwnFails": "RuntimeError: sizes differ",
    "OwnFailsWhenMade": "cannot be made: ValueError: no camera",
    "Goood": 'Did you mean "Good"?',
}
PIECES = {
    "NoPiece": "is not a piece of a network",
    "FailingPiece": "cannot be made for an input of shape",
    "WrongPiece": "mat1 and mat2 shapes cannot be multiplied",
    "Good": "is not a piece of a network",
}
SETTINGS = {
    "CartPole-v1 --network modulr": 'Did you mean "modular"?',
    "CartPole-v1 --network no_such_module:Net": "there is no module no_such_module",
    "CartPole-v1 --network.body lstmm": 'Did you mean "lstm"?',
    "CartPole-v1 --network.net1d nature_cnn": "takes tensors of rank 3: choose a piece of rank 1",
    "CartPole-v1 --network.body nature_cnn": "at least 36×36",
    "CartPole-v1 --network.activation rleu": 'Did you mean "relu"?',
    "CartPole-v1 --network.body lstm --compile on": "compile is on, but a recurrent network",
    "CartPole-v1 --network.body lstm --agent.minibatches 3": "more than the 2 environments",
    "CartPole-v1 --agent.minibatches 33": "more than the 32 transitions",
    "fault_worlds:Images --network.net3d identity3d --network.body identity3d": "cannot be joined",
}


def train(words):
    environment, *rest = words.split()
    return ["train", environment, "--preset", "none", *flags(TINY | {"agent.minibatches": 2}), *rest]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_ones_own(refused, name):
    assert name in refused(train(f"CartPole-v1 --network fault_networks:{name}"), NETWORKS[name])


@pytest.mark.parametrize("place", ["net1d", "body", "head1d"])
@pytest.mark.parametrize("name", PIECES)
def test_a_piece_of_ones_own(refused, name, place):
    assert name in refused(train(f"CartPole-v1 --network.{place} fault_networks:{name}"), PIECES[name])


@pytest.mark.parametrize("words", SETTINGS)
def test_settings_that_do_not_fit_together(refused, words):
    refused(train(words), SETTINGS[words])


@pytest.mark.parametrize("name", NETWORKS)
def test_python_says_the_same(refused_by_train, name):
    refused_by_train("CartPole-v1", NETWORKS[name], **{"network.name": f"fault_networks:{name}"})
