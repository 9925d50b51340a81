"""Hidden states, noise, resolving names and masks."""

from __future__ import annotations

import pytest
import torch

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.imports import resolve
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Spec, mask_name, network_inputs


def test_hidden_state_resets_only_first_rows() -> None:
    state = HiddenState({"h": torch.ones(3, 2), "c": torch.ones(3, 2, 2)})
    reset = state.reset(torch.tensor([False, True, False]))
    assert reset["h"].sum(1).tolist() == [2, 0, 2]
    assert reset["c"].sum((1, 2)).tolist() == [4, 0, 4]
    assert state["h"].sum() == 6  # the original is untouched


def test_prefixes_keep_hidden_states_apart() -> None:
    one, two = HiddenState({"h": torch.zeros(1)}), HiddenState({"h": torch.ones(1)})
    both = HiddenState(one.with_prefix("actor/body") | two.with_prefix("critic/body"))
    assert both.select("actor")["body/h"] == 0
    assert both.select("critic").select("body")["h"] == 1


def test_detach() -> None:
    state = HiddenState({"h": torch.ones(1, requires_grad=True) * 2})
    assert not state.detach()["h"].requires_grad


def draw(steps: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"action": torch.rand(steps, 2, generator=generator)}


@pytest.mark.parametrize("used", [0, 1, 5, 8, 11])
def test_noise_resumes_from_its_state(used: int) -> None:
    noise = Noise(draw, torch.Generator().manual_seed(1), Rows.all(2), chunk=8)
    for _ in range(used):
        noise.next()
    copy = Noise(draw, torch.Generator().manual_seed(2), Rows.all(2), chunk=8)
    copy.load_state_dict(noise.state_dict())
    for _ in range(20):
        assert torch.equal(noise.next()["action"], copy.next()["action"])


def test_resolve_and_its_errors() -> None:
    assert resolve("spec", {"spec": "ludus.core.spec:Spec"}, "thing") is Spec
    assert resolve("ludus.core.spec:Spec", {}, "thing") is Spec
    with pytest.raises(UserError, match=r'Unknown thing "spce".*Did you mean "spec"'):
        resolve("spce", {"spec": "x:y"}, "thing")
    with pytest.raises(UserError, match="no module nowhere"):
        resolve("nowhere:X", {}, "thing")
    with pytest.raises(UserError, match=r'has no Spek\. Did you mean "Spec"'):
        resolve("ludus.core.spec:Spek", {}, "thing")


def test_masks_are_not_network_inputs() -> None:
    box, mask = Spec((2,), "float32"), Spec((3,), "bool", "binary")
    assert list(network_inputs({"x": box, "action_mask": mask, "action_mask/a": mask})) == ["x"]
    assert mask_name("a", {"a": mask}) == "action_mask"
    assert mask_name("a", {"a": mask, "b": mask}) == "action_mask/a"
