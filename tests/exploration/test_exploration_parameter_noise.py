import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from ludus.exploration.parameter_noise import ParameterNoise, draw_seeds, rms_distance, softmax_kl


class Net(nn.Module):
    """All kinds of parameters and buffers that are handled differently."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, 60), nn.LayerNorm(60), nn.Tanh(), nn.BatchNorm1d(60), nn.Linear(60, 50))
        self.scale = nn.Parameter(torch.ones(100))
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))


ALL = torch.tensor(True)  # rows are real


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make(**settings):
    torch.manual_seed(0)
    net = Net()
    return net, ParameterNoise(net, **settings)


def perturbation(net, noise):
    """Return θ̃ − θ by name."""
    perturbed = dict(noise.perturbed.named_parameters())
    return {name: (perturbed[name] - p).detach() for name, p in net.named_parameters()}


def test_all_parameters_get_gaussian_noise_except_those_of_norms():
    net, noise = make(sigma_init=0.2)
    noise.resample(generator())
    moved = perturbation(net, noise)
    for name in ("body.1.weight", "body.1.bias", "body.3.weight", "body.3.bias", "counts"):
        assert not moved.pop(name).any(), name
    assert len(moved) == 5
    for name, x in moved.items():
        z = x.double().numpy().ravel() / 0.2
        assert (z != 0).all(), name
        assert abs(z.mean()) < 4 / math.sqrt(z.size), name
        assert abs(z.var() - 1) < 4 * math.sqrt(2 / z.size), name
    z = np.concatenate([x.double().numpy().ravel() / 0.2 for x in moved.values()])
    assert abs(np.mean(z**4) - 3) < 4 * math.sqrt(96 / z.size)
    a, b = (moved[name].flatten()[:2400].double().numpy() for name in ("body.0.weight", "body.4.weight"))
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(2400)  # layers have independent noise


def test_resample_perturbs_the_current_parameters():
    net, noise = make(sigma_init=0.1)
    assert not any(x.any() for x in perturbation(net, noise).values())
    noise.resample(generator(1))
    before = perturbation(net, noise)
    with torch.no_grad():
        for p in net.parameters():
            p += 5 if p.is_floating_point() else 1
        net.seen += 3
        net.body[3].running_mean += 2
    noise.resample(generator(1))
    for name, x in perturbation(net, noise).items():
        torch.testing.assert_close(x, before[name], atol=1e-5, rtol=0)
    assert torch.equal(noise.perturbed.seen, net.seen)
    assert torch.equal(noise.perturbed.body[3].running_mean, net.body[3].running_mean)


def test_module_is_unchanged_and_the_copy_has_no_gradients():
    net, noise = make()
    before = copy.deepcopy(net.state_dict())
    noise.resample(generator())
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert not any(p.requires_grad for p in noise.parameters())
    assert net.scale.requires_grad
    ours = {id(p) for p in noise.parameters()}
    assert not ours & {id(p) for p in net.parameters()}
    net.body(torch.ones(2, 40)).sum().backward()
    assert all(p.grad is None for p in ParameterNoise(net).parameters())


def test_resamples_when_row_0_starts_an_episode():
    net, noise = make()
    numbers, others = draw_seeds(2, 2, generator())
    noise.resample_on_reset(torch.tensor([True, False]), numbers)
    one = perturbation(net, noise)["scale"]
    for first in ([False, False], [False, True]):
        noise.resample_on_reset(torch.tensor(first), others)
        assert torch.equal(perturbation(net, noise)["scale"], one)
    noise.resample_on_reset(torch.tensor([True, True]), others)
    other = perturbation(net, noise)["scale"]
    assert (other != one).all()
    assert abs(float(np.corrcoef(one, other)[0, 1])) < 4 / 10


def test_resample_in_inference_mode():
    net, noise = make()
    with torch.inference_mode():
        noise.resample(generator())
    noise.adapt(torch.tensor(1.0))
    noise.resample(generator())
    assert perturbation(net, noise)["scale"].all()
    assert not any(x.is_inference() for x in noise.state_dict().values())


def test_sigma_adapts_to_the_distance():
    _, noise = make(sigma_init=0.1, target=0.5, rate=1.01)
    noise.adapt(torch.tensor(0.5))
    noise.adapt(torch.tensor(0.1))
    assert float(noise.sigma) == pytest.approx(0.1 * 1.01**2, rel=1e-12)
    for _ in range(3):
        noise.adapt(torch.tensor(0.51))
    assert float(noise.sigma) == pytest.approx(0.1 / 1.01, rel=1e-12)
    noise.adapt(torch.tensor(math.nan))  # NaN must not increase σ
    assert float(noise.sigma) < 0.1 / 1.01


def test_sigma_converges_to_the_target_distance():
    torch.manual_seed(1)
    actor, numbers = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2), nn.Tanh()), generator(2)
    noise = ParameterNoise(actor, sigma_init=1.0, target=0.2, rate=1.05)
    observation, distances = torch.randn(64, 3, generator=numbers), []
    with torch.no_grad():
        for _ in range(400):
            noise.resample(numbers)
            distances.append(rms_distance(actor(observation), noise.perturbed(observation), ALL))
            noise.adapt(distances[-1])
    assert float(torch.stack(distances[:5]).mean()) > 0.5
    assert float(torch.stack(distances[200:]).median()) == pytest.approx(0.2, rel=0.15)


def test_resume_from_state_dict():
    net, noise = make(sigma_init=0.3)
    numbers = generator(3)
    noise.resample(numbers)
    noise.adapt(torch.tensor(0.0))
    state, saved = copy.deepcopy(noise.state_dict()), numbers.get_state()
    assert float(state["sigma"]) == pytest.approx(0.303)
    assert sum(name.endswith("scale") for name in state) == 1  # the module itself is not saved again
    other = ParameterNoise(net)
    other.load_state_dict(state)
    numbers_too = generator()
    numbers_too.set_state(saved)
    for _ in range(2):
        assert all(torch.equal(x, other.state_dict()[name]) for name, x in noise.state_dict().items())
        noise.resample(numbers)
        other.resample(numbers_too)


def test_a_copied_agent_perturbs_its_own_parameters():
    agent = nn.Module()
    agent.actor, noise = make()
    agent.noise = noise
    twin = copy.deepcopy(agent)
    with torch.no_grad():
        agent.actor.scale += 100
    twin.noise.resample(generator())
    assert float(twin.noise.perturbed.scale.max()) < 10


def test_rms_distance():
    a, b = torch.randn(2, 5, 3, 4, dtype=torch.float64, generator=generator()).unbind(0)
    expected = math.sqrt(np.mean((a.numpy() - b.numpy()) ** 2))
    assert float(rms_distance(a, b, ALL)) == pytest.approx(expected, rel=1e-12)
    assert float(rms_distance(a, a, ALL)) == 0
    x = torch.randn(100_000, 2, generator=generator(1))
    noisy = x + 0.3 * torch.randn(x.shape, generator=generator(2))
    assert float(rms_distance(x, noisy, ALL)) == pytest.approx(0.3, 0.01)


@pytest.mark.parametrize("distance", [rms_distance, softmax_kl])
def test_distances_are_those_of_the_real_rows_of_all_ranks(distance):
    a, b = torch.randn(2, 5, 3, 4, dtype=torch.float64, generator=generator()).unbind(0)
    real = torch.ones(5, 3, dtype=torch.bool)
    real[3:, 1] = real[1:, 2] = False
    expected = distance(a[real], b[real], ALL)
    torch.testing.assert_close(distance(a, b, real), expected)
    sums = []
    distance(a[:, 1:], b[:, 1:], real[:, 1:], lambda x: sums.append(x) or x)  # what another rank has
    ours = distance(a[:, :1], b[:, :1], real[:, :1], lambda x: x + sums[0])
    torch.testing.assert_close(ours, expected)
