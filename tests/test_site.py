"""What the documentation site adds to the pages of docs/; `make docs` builds the whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs")

from mkdocs.config import load_config
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import hicache

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_to_files_outside_of_docs_lead_to_their_copies(hooks: ModuleType) -> None:
    """Such a link is moved, relative to its page; links within docs/, to addresses and to nothing stay as they are."""
    config = load_config(plugins=[], config_file_path=None, docs_dir=str(ROOT / "docs"))
    page = Page(None, File("integrations/vllm.md", str(ROOT / "docs"), "site", False), config)
    given = (
        "[a](../../README.md) [b](../../bench/common.py#L3) [c](../operating.md) [d](https://x.org/../y) [e](#f) "
        "[g](../../missing.py) [h](../../../outside.txt)"
    )
    assert hooks.on_page_markdown(given, page, config, Files([])) == (
        "[a](../repository/README.md.txt) [b](../repository/bench/common.py#L3) [c](../operating.md) "
        "[d](https://x.org/../y) [e](#f) [g](../../missing.py) [h](../../../outside.txt)"
    )


def test_the_reference_has_every_public_name(hooks: ModuleType) -> None:
    """The pages together name what `hicache` exports, once each."""
    named = [name.rsplit(".", 1)[1] for names in hooks._public_names().values() for name in names]
    assert sorted(named) == hicache.__all__
