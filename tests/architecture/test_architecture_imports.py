"""Who may import whom, and who must stay small."""

import subprocess
import sys
from pathlib import Path

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


def test_environment_processes_do_not_load_torch():
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    if 'torch' in sys.modules: sys.exit(f'importing {name} loads torch')"
    command = [sys.executable, "-c", code, *NO_TORCH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
