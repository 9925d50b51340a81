"""Noisy layers: the distribution of their noise, and evaluation without it."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ludus.core.types import Tensors
from ludus.networks.noisy import NoisyLinear, noisy_layers, resample_noise, scale_noise, without_noise


def make(inputs: int = 6, outputs: int = 4) -> NoisyLinear:
    torch.manual_seed(0)
    return NoisyLinear(inputs, outputs)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_output_matches_the_equation() -> None:
    layer, x = make(), torch.randn(3, 2, 6)
    resample_noise(layer, generator())
    mu, sigma = layer.weight.detach().double().numpy(), layer.weight_sigma.detach().double().numpy()
    eps_in, eps_out = layer.eps_in.double().numpy(), layer.eps_out.double().numpy()
    expected = x.double().numpy() @ (mu + sigma * (eps_out[:, None] * eps_in[None, :])).T
    expected += layer.bias.detach().double().numpy() + layer.bias_sigma.detach().double().numpy() * eps_out
    torch.testing.assert_close(layer(x).double(), torch.from_numpy(expected), atol=1e-6, rtol=1e-5)


def test_initial_weights_are_those_of_the_paper() -> None:
    layer = make(400, 300)
    assert layer.weight.abs().max() <= 1 / sqrt(400)
    assert layer.bias.abs().max() <= 1 / sqrt(400)
    torch.testing.assert_close(layer.weight.std().item(), 1 / sqrt(3 * 400), rtol=0.02, atol=0)
    for sigma in (layer.weight_sigma, layer.bias_sigma):
        torch.testing.assert_close(sigma.detach(), torch.full_like(sigma, 0.5 / sqrt(400)))
    assert layer.eps_in.any()  # noisy from the first step
    assert layer.eps_out.any()


def test_noise_is_the_signed_root_of_normal_noise() -> None:
    assert scale_noise(torch.tensor([4.0, -9.0, 0.0])).tolist() == [2.0, -3.0, 0.0]
    layer = make(200, 100)
    drawn = torch.randn(300, generator=generator(3))
    resample_noise(layer, generator(3))
    torch.testing.assert_close(torch.cat([layer.eps_in, layer.eps_out]), scale_noise(drawn))


def test_weights_vary_by_sigma_around_their_means() -> None:
    layer, draws = make(3, 2), 4000
    nn.init.constant_(layer.weight_sigma, 0.3)
    rng, found = generator(), []
    eye = torch.cat([torch.zeros(1, 3), torch.eye(3)])
    with torch.no_grad():
        for _ in range(draws):
            resample_noise(layer, rng)
            y = layer(eye)
            found.append(y[1:] - y[:1])  # the weights alone
    w = torch.stack(found)
    # E f(ε)² = E|ε| = √(2/π), so the product of two has variance 2/π
    deviation = 0.3 * sqrt(2 / torch.pi)
    assert (w.mean(0) - layer.weight.t()).abs().max() < 4.5 * deviation / sqrt(draws)
    assert (w.std(0) / deviation - 1).abs().max() < 0.1


def test_noise_of_a_module_comes_only_from_the_generator() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(NoisyLinear(3, 5), nn.Tanh(), nn.Sequential(NoisyLinear(5, 2)))
    before = torch.random.get_rng_state()
    resample_noise(module, generator(1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(noisy_layers(module)) == 2
    found = torch.cat([eps for layer in noisy_layers(module) for eps in (layer.eps_in, layer.eps_out)])
    torch.testing.assert_close(found, scale_noise(torch.randn(15, generator=generator(1))))
    rng = generator(1)
    resample_noise(module, rng)
    resample_noise(module, rng)
    assert not torch.equal(noisy_layers(module)[0].eps_in, found[:3])
    resample_noise(nn.Linear(2, 2), rng)  # nothing to do


def test_without_noise_uses_the_means() -> None:
    module, x = nn.Sequential(make(), nn.Tanh()), torch.randn(5, 6)
    layer = noisy_layers(module)[0]
    noisy = module(x)
    with without_noise(module):
        means = module(x)
        with pytest.raises(KeyError), without_noise(module):
            raise KeyError
        assert torch.equal(module(x), means)
    torch.testing.assert_close(means, torch.tanh(nn.functional.linear(x, layer.weight, layer.bias)))
    assert not torch.allclose(noisy, means)
    assert torch.equal(module(x), noisy)  # and back


def test_gradients_reach_mu_and_sigma_and_noise_is_in_the_state_dict() -> None:
    layer, x = make(), torch.randn(5, 6)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    other = NoisyLinear(6, 4)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_new_noise_is_an_input_of_a_traced_function() -> None:
    layer, x = make(), torch.randn(5, 6)

    def run(tensors: Tensors) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, tensors, (x,))
        return found

    def tensors() -> Tensors:
        return {name: y.detach().clone() for name, y in [*layer.named_parameters(), *layer.named_buffers()]}

    traced = make_fx(run)(tensors())
    resample_noise(layer, generator(5))
    torch.testing.assert_close(traced(tensors()), layer(x))
