"""`hicache store` in a process of its own, for its tests."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

# What the demo needs takes seconds to import, and must not be needed here.
LEAN = (
    "import sys; sys.modules['transformers'] = None;"
    "from hicache.cli import main; sys.exit(main(['store', *sys.argv[1:]]))"
)


def spawn(*arguments: object, code: str = LEAN, **settings: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **{**pipes, **settings})


def child(*arguments: object, status: int = 0, **settings: Any) -> str:
    """The output of the command in a process of its own, which must end with `status` and say nothing else."""
    process = spawn(*arguments, **settings)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert not err, err
    return out.decode()
