"""Returns the names of machine, software and commit for a result. Imports torch."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import hicache

_ABOVE = Path(__file__).resolve().parent.parent
# The repository that the benchmarks run from; None if they are installed without it.
ROOT = _ABOVE if (_ABOVE / "pyproject.toml").is_file() else None
RESULTS = Path("bench-results") if ROOT is None else ROOT / "bench" / "results"

_TREES = {"hicache": "hicache", **{name: f"hicache.{name}" for name in ("kernels", "storage", "bench")}}
# In a wheel these folders are in hicache/; they have their own digests, and results have none.
_NOT_OF_A_TREE = {"kernels", "storage", "bench", "results"}


def machine_name(device: torch.device) -> str:
    """Return the name of the machine, like `nvidia-h200`, or `cpu-8core` with the number of cores that this process may
    use."""
    if device.type == "cuda":
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    cores = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count()
    return f"{device.type}-{cores}core"


def software(device: torch.device) -> dict[str, str]:
    """Return the versions of the software that affects a result; packages that are not installed are left out."""
    versions = {"python": platform.python_version(), "hicache": hicache.__version__}
    for name in ("torch", "triton", "numpy", "lmdb", "zstandard"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], Path("/"))
        if driver:
            versions["driver"] = driver.splitlines()[0]
    return versions


def commit_of(folder: Path | None) -> str:
    """Return the commit that is checked out in `folder`, with "+dirty" if files differ from this commit. Returns
    "unknown" without a repository.

    Files below bench/results do not count, because the first benchmark of a series would make the commit dirty for all
    later benchmarks.
    """
    if folder is None:
        return "unknown"
    top, commit = (
        _output(["git", "rev-parse", "--show-toplevel"], folder),
        _output(["git", "rev-parse", "HEAD"], folder),
    )
    if not top or not commit or Path(top).resolve() != folder.resolve():
        return "unknown"
    changed = _output(["git", "status", "--porcelain", "--", ".", ":(exclude)bench/results"], folder)
    return commit if changed == "" else f"{commit}+dirty"


def trees() -> dict[str, str]:
    """Return digests of the source files of hicache, kernels, storage and bench, in the folders from which Python
    imports them."""
    return {name: source_digest(Path(importlib.import_module(package).__path__[0])) for name, package in _TREES.items()}


def source_digest(tree: Path) -> str:
    """Return a digest of the files below `tree`. Comments and docstrings of Python files do not change it. Releases of
    Python have different digests of the same files."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        parts = path.relative_to(tree).parts
        if path.is_file() and parts[0] not in _NOT_OF_A_TREE and "__pycache__" not in parts:
            content = _statements(path.read_text()) if path.suffix == ".py" else path.read_bytes()
            digest.update("/".join(parts).encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:12]


def _statements(source: str) -> bytes:
    """Return the syntax tree of a Python file without docstrings."""
    module = ast.parse(source)
    for node in ast.walk(module):
        has_docstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, has_docstring) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(module).encode()


def _output(command: list[str], folder: Path) -> str | None:
    """Return the output of a program; None if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
