"""What commands print about several agents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers_setup import train

from ludus.cli.main import main
from ludus.data.npz import load_npz
from ludus.environments.agents_toy import Nim

OWN = r"return (-?[\d.]+)(?: \(std [\d.]+\))? \(player_0 (-?[\d.]+), player_1 (-?[\d.]+)\)"


class DrawnNim(Nim):
    """Nim with pictures."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.zeros((16, 16, 3), np.uint8)


@pytest.mark.parametrize("agent", ["ppo", "vdn"])
def test_a_game_of_zero_sum_is_told_by_the_return_of_each_player(
    agent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {} if agent == "ppo" else {"agent__warmup": 40, "agent__batch_size": 8}
    run = str(train(tmp_path, f"{__name__}:DrawnNim", agent, **small).run)
    capsys.readouterr()
    assert main(["play", run, "--episodes", "3", "--out", str(tmp_path / "film.gif")]) == 0
    told = [list(map(float, x)) for x in re.findall(OWN, capsys.readouterr().out)]
    assert len(told) == 3
    assert all(mean == 0 and abs(one) == 1 and other == -one for mean, one, other in told)
    for flags in ([], ["--replay"] if agent == "vdn" else ["--stochastic"]):
        file = tmp_path / "games.npz"
        assert main(["record", run, *flags, "--out", str(file)]) == 0
        ((_, one, other),) = re.findall(OWN, capsys.readouterr().out)
        sums = [x.observation["reward/player_0"][1:].sum() for x in load_npz(str(file)).episodes]
        assert float(one) == -float(other) == pytest.approx(np.mean(sums), abs=0.006)
