"""Who may import whom, and who must stay small."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_layers_are_kept():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


NO_TORCH = [
    "ludus",
    "ludus.core.errors",
    "ludus.core.imports",
    "ludus.core.spec",
    "ludus.environments.gym",
    "ludus.preprocess.actions",
]


@pytest.mark.parametrize("module", NO_TORCH)
def test_environment_processes_do_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"importing {module} loads torch"


def test_importing_ludus_loads_no_other_package():
    code = "import sys, ludus; print(*sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:])))"
    heavy = [
        "torch",
        "numpy",
        "gymnasium",
        "rich",
        "safetensors",
        "tensorboard",
        "envpool",
        "pygame",
        "imageio",
    ]
    done = subprocess.run([sys.executable, "-c", code, *heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
