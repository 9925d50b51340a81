import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.hidden_state import HiddenState
from ludus.networks.config import NetworkConfig
from ludus.networks.net1d.lstm import LSTM


def make(dtype=torch.float64, features=3, size=5):
    torch.manual_seed(0)
    return LSTM((features,), NetworkConfig(lstm_size=size)).to(dtype)


def run(lstm, x, state, first, loop):
    """Return outputs, final state and all gradients, in one call or step by step with the state reset by hand."""
    x = x.clone().requires_grad_()
    start = HiddenState({name: s.clone().requires_grad_() for name, s in state.items()})
    lstm.zero_grad()
    if loop:
        h, c = start["h"], start["c"]
        outputs = []
        for t in range(len(x)):
            keep = (~first[t]).to(x.dtype).unsqueeze(-1)
            h, c = lstm.cells[0](x[t], (h * keep, c * keep))
            outputs.append(h)
        output, after = torch.stack(outputs), {"h": h, "c": c}
    else:
        output, after = lstm(x, start, first)
    (output.square().sum() + (after["h"] * 2).sum() + after["c"].pow(3).sum()).backward()
    gradients = [x.grad, start["h"].grad, start["c"].grad, *(p.grad.clone() for p in lstm.parameters())]
    return [output, after["h"], after["c"], *gradients]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 99))
def test_sequence_matches_a_loop_of_steps(time, batch, chance, seed):
    lstm = make()
    torch.manual_seed(seed)
    x = torch.randn(time, batch, 3, dtype=torch.float64)
    state = HiddenState({k: torch.randn(batch, 5, dtype=torch.float64) for k in "hc"})
    first = torch.rand(time, batch) < chance
    for one_call, looped in zip(run(lstm, x, state, first, False), run(lstm, x, state, first, True), strict=True):
        torch.testing.assert_close(one_call, looped, atol=1e-12, rtol=1e-9)


def test_fused_float32_kernel_matches():
    lstm = make(torch.float32, 16, 64)
    x, first = torch.randn(128, 8, 16), torch.rand(128, 8) < 0.05
    state = HiddenState({k: torch.randn(8, 64) for k in "hc"})
    one_call, looped = run(lstm, x, state, first, False), run(lstm, x, state, first, True)
    for a, b in zip(one_call[:3], looped[:3], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    for a, b in zip(one_call[3:], looped[3:], strict=True):  # sums over a thousand rows
        torch.testing.assert_close(a, b, atol=1e-6 * float(b.abs().max()), rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(lstm(x, state, first)[0], looped[0], atol=1e-6, rtol=1e-6)


def test_acting_step_by_step_matches_learning():
    lstm = make()
    x, first = torch.randn(20, 3, 3, dtype=torch.float64), torch.rand(20, 3) < 0.2
    state = lstm.initial_state(3)
    together, last = lstm(x, state, first)
    for t in range(20):
        y, state = lstm(x[t : t + 1], state, first[t : t + 1])
        torch.testing.assert_close(y[0], together[t])
    torch.testing.assert_close(dict(state), dict(last))


@pytest.mark.parametrize("time", [1, 4])
def test_nan_state_before_a_first_is_reset(time):
    lstm = make()
    x, first = torch.randn(time, 2, 3, dtype=torch.float64), torch.zeros(time, 2, dtype=torch.bool)
    first[0] = True
    clean, _ = lstm(x, lstm.initial_state(2), first)
    dirty, _ = lstm(x, lstm.initial_state(2).map(lambda s: s + torch.nan), first)
    assert torch.equal(clean, dirty)


def test_initial_weights():
    lstm = make()
    gate = lstm.cells[0].weight_hh[:5]
    torch.testing.assert_close(gate @ gate.T, torch.eye(5, dtype=torch.float64), atol=1e-6, rtol=0)
    assert lstm.cells[0].bias_ih.tolist() == [0] * 5 + [1] * 5 + [0] * 10
    assert "gates" not in lstm.state_dict()
