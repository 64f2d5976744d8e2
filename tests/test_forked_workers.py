"""The verdict of a run in forked workers is that of its tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"
TESTS = """
import os, signal, subprocess, sys
import pytest

@pytest.mark.parametrize("number", range(60))
def test_number(number, tmp_path):
    print("said by", number)
    (tmp_path / "file").write_text("own")
    assert number != 7

def test_takes_processor_time():
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
"""
DIES = """
def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "forked_workers", "--workers", "2", *arguments, "."]
    variables = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_verdict_is_that_of_the_tests(tmp_path: Path) -> None:
    """A failure is told with its output, `-x` ends the run early, and who kills a worker is named."""
    (tmp_path / "pytest.ini").touch()
    file = tmp_path / "test_many.py"
    file.write_text(TESTS)
    status, said = _run(tmp_path)
    assert status == 1 and "1 failed, 60 passed" in said and re.findall("said by .*", said) == ["said by 7"]
    assert re.search(r"processor time of tests: \d+ s", said) and "test_many.py" in said
    status, said = _run(tmp_path, "-x")
    assert status != 0 and int(re.findall(r"(\d+) passed", said)[0]) < 60
    file.write_text(TESTS.replace("number != 7", "True") + DIES)
    status, said = _run(tmp_path)
    assert status != 0 and "test_many.py::test_dies" in said
