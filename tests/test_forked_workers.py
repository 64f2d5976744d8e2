"""A run in forked workers has the result of its tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"
TESTS = """
import os, signal
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(60))
def test_number(number, tmp_path):
    print("said by", number)
    (tmp_path / "file").write_text("own")
    Path("begun").touch()
    assert number != 7
"""
SHARED = """
import os
from waiting import eventually

def test_one(server):
    eventually(lambda: os.path.exists("begun"))  # the other worker has begun with others

def test_another(server):
    assert os.getpid() == server, "made by another worker"
"""
CONFTEST = """
import os
import pytest

@pytest.fixture(scope="session")
def server():
    with open(os.path.join(os.path.dirname(__file__), "made"), "a") as file:
        file.write("once ")
    return os.getpid()
"""
TELLS = """
import os
from pathlib import Path

RUN = os.getpid()  # of which the workers are forked

def pytest_runtest_logreport(report):
    if report.failed and os.getpid() == RUN:
        Path("failed").touch()
"""
DIES = """
def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "forked_workers", "--workers", "2", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    variables.pop("HICACHE_TEST_PROFILE", None)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_verdict_is_that_of_the_tests(tmp_path: Path) -> None:
    """A failure is reported with its output, `-x` ends the run early, and a test that kills its worker is named.
    Session fixtures that two files use are created once."""
    (tmp_path / "pytest.ini").touch()
    below = tmp_path / "below"
    below.mkdir()
    (below / "conftest.py").write_text(CONFTEST)
    for name in ("first", "second"):
        (below / f"test_{name}.py").write_text(SHARED)
    file = tmp_path / "test_many.py"
    file.write_text(TESTS)
    status, printed = _run(tmp_path)
    assert status == 1 and "1 failed, 63 passed" in printed and re.findall("said by .*", printed) == ["said by 7"]
    assert (below / "made").read_text() == "once "
    (tmp_path / "conftest.py").write_text(TELLS)
    file.write_text(f"from waiting import eventually\n{TESTS}    number < 8 or eventually(Path('failed').exists)\n")
    status, printed = _run(tmp_path, "-x")
    assert status != 0 and int(re.findall(r"(\d+) passed", printed)[0]) < 63
    file.write_text(TESTS.replace("number != 7", "True") + DIES)
    status, printed = _run(tmp_path)
    assert status != 0 and "test_many.py::test_dies" in printed
