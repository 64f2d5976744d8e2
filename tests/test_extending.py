"""docs/extending.md shows the code of the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "extending.md").read_text()


def test_its_code_is_that_of_the_tests() -> None:
    """Each block of code stands, line by line, in the file that its first line names."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == TEXT.count("```python") == 9
    for path, code in blocks:
        assert code in (ROOT / path).read_text(), path


def test_the_files_that_it_names_are_there() -> None:
    """Every path of the repository in its text exists, and every name of a module is one."""
    paths = re.findall(r"`((?:tests|hicache|docs)/[\w/]+\.\w+)`", TEXT) + re.findall(r"\]\((\w+\.md)\)", TEXT)
    assert len(paths) > 7
    assert all((ROOT / path).exists() or (ROOT / "docs" / path).exists() for path in paths), paths
