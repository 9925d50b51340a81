"""Format, lint and types: what `make lint` and `make type` check, as tests."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command):
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)


def test_ruff_finds_nothing():
    done = run("ruff", "check", ".")
    assert done.returncode == 0, done.stdout


def test_the_code_is_formatted():
    done = run("ruff", "format", "--check", ".")
    assert done.returncode == 0, f"{done.stdout}run `make format`"


def test_mypy_strict_finds_nothing():
    done = run("mypy")
    assert done.returncode == 0, done.stdout
