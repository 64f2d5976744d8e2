"""Makes README's links absolute for the package index. pyproject.toml declares everything else."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).resolve().parent
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
TAG = f"v{PROJECT['version']}"


def absolute(link: re.Match[str]) -> str:
    """A Markdown link or picture (`!`) with its address in the repository, at the tag of this version."""
    kind = "raw" if link[1] else "blob"
    return f"{link[1]}[{link[2]}]({PROJECT['urls']['Repository']}/{kind}/{TAG}/{link[3]})"


readme = re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)\s]+)\)", absolute, (FOLDER / "README.md").read_text())
setup(long_description=readme, long_description_content_type="text/markdown")
