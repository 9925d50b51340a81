"""``ludus show gradients RUN``."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from containers_setup import train

from ludus.cli.main import main
from ludus.logging.gradient_picture import MAX, MEAN, LayerGradient, draw_gradients

NAMESPACE = "{http://www.w3.org/2000/svg}"


def bars(svg: str) -> dict[str, dict[str, float]]:
    """The widths of the bars by layer and colour."""
    found: dict[str, dict[str, float]] = {}
    for rect in ElementTree.fromstring(svg).iter(f"{NAMESPACE}rect"):
        title = rect.find(f"{NAMESPACE}title")
        if title is not None:
            name = (title.text or "").partition(": mean")[0]
            found.setdefault(name, {})[rect.attrib["fill"]] = float(rect.attrib["width"])
    return found


def test_the_last_check_of_a_run_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = train(tmp_path, "CartPole-v1", network_check__every=40).run, tmp_path / "flow.svg"
    assert main(["show", "gradients", str(run), "--svg", str(out)]) == 0
    shown = capsys.readouterr().out
    drawn = bars(out.read_text())
    assert list(drawn)[-1] == "critic.projections.value"
    assert all(name in shown and widths[MAX] >= widths[MEAN] > 0 for name, widths in drawn.items())
    assert main(["show", "gradients", str(run), "--step", "1", "--svg", str(out)]) == 0
    assert bars(out.read_text()) != drawn
    first = capsys.readouterr().out
    assert int(first.partition("step ")[2].partition(":")[0]) < int(shown.partition("step ")[2].partition(":")[0])


def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "CartPole-v1").run
    assert main(["show", "gradients", str(run)]) == 2
    assert "has no network check: train with --network-check.every" in capsys.readouterr().err
    assert main(["show", "gradients", "nowhere"]) == 2
    assert main(["show", "nothing"]) == 2
    assert "ludus show gradients RUN" in capsys.readouterr().err


def test_bars_are_logarithmic_and_odd_gradients_are_written_out() -> None:
    layers = {
        "a<b": LayerGradient(1e-6, 1e-2),
        "none": LayerGradient(0.0, 0.0),
        "nan": LayerGradient(math.nan, math.inf),
        "c": LayerGradient(1e-4, 1.0),
    }
    svg = draw_gradients(layers, "1 < 2")
    drawn = bars(svg)
    assert list(drawn) == ["a<b", "c"]
    assert drawn["c"][MEAN] - drawn["a<b"][MEAN] == pytest.approx(drawn["c"][MAX] - drawn["a<b"][MAX], abs=0.2)
    assert "no gradient" in svg
    assert "NaN or Inf" in svg
    ElementTree.fromstring(draw_gradients({"x": LayerGradient(0.0, 0.0)}, ""))
    ElementTree.fromstring(draw_gradients({"x": LayerGradient(1.0, 1.0)}, ""))
