"""`.ci/plain` holds the words of each folder to a budget."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

PLAIN = Path(__file__).parent.parent / ".ci" / "plain"


@pytest.mark.parametrize(("budget", "status"), [(0, 1), (1, 0)])
def test_a_folder_over_its_budget_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], budget: int, status: int
) -> None:
    """The check fails if a folder has more findings than its budget, and names the sentence and the folder."""
    spec = spec_from_loader("plain", SourceFileLoader("plain", str(PLAIN)))
    assert spec is not None and spec.loader is not None
    plain = module_from_spec(spec)
    spec.loader.exec_module(plain)
    monkeypatch.setattr(plain, "ROOT", tmp_path)
    monkeypatch.setattr(plain, "BUDGETS", tmp_path / "plain.toml")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "bad.py").write_text("# Who finds no page waits.\n# A request without a page waits.\n")
    plain.BUDGETS.write_text(f"pages = {budget}\n")
    assert plain.main([]) == status
    assert ("pages/bad.py:1: a pronoun as the subject: Who" in capsys.readouterr().out) == bool(status)
