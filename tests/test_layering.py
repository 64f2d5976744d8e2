"""The architecture's rules, held by walking the syntax trees of the package as it installs.

`check_source` takes one module's name and text and lists what it breaks; the second half of this file feeds it bad
sources, so that a rule that stopped working is noticed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TREES = {"hicache": "hicache", "kernels": "hicache.kernels", "storage": "hicache.storage"}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50

# From the top down. A unit may import itself and every unit of a lower level.
LEVELS = (
    ("bench",),
    ("cli", "__main__", "serving", "planning", "store_command", "config_command", "integrations", "plot", "monitoring"),
    ("abandoned", "engine", "factory", "kv_events", "prefix_cache", "sizing", "stores", "tensor_cache", "validation"),
    ("flow", "replay"),
    ("tree", "alloc", "device", "transfer", "host", "disk"),
    ("layout",),
    ("config", "settings", "store_config", "metrics"),
    ("kernels", "storage"),
    ("console",),
    ("errors", "public_names"),
)
RANKS = {unit: len(LEVELS) - level for level, units in enumerate(LEVELS) for unit in units}
# Levels whose units may import one another too; the six tiers, kernels and storage stand apart.
SOCIABLE = {RANKS["cli"], RANKS["engine"], RANKS["config"]}

# Within flow/, from the top down: a movement imports those of lower levels.
FLOW_LEVELS = (
    ("inspection",),
    ("admit", "commit"),
    ("device_eviction",),
    ("backup",),
    ("persist", "prefetch", "restore"),
    ("prefix_read",),
    ("read_state", "prefetch_counters"),
    ("host_eviction", "disk_prefix", "check", "cost", "usage"),
    ("context",),
    ("components",),
    ("lease", "completion"),
    ("load", "write_policy"),
)
FLOW_RANKS = {name: len(FLOW_LEVELS) - level for level, names in enumerate(FLOW_LEVELS) for name in names}

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
LOGGING = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log"}
COUNTING = {"inc", "increment", "set_exception"}
BROAD = {"Exception", "BaseException"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_source(module: str, source: str, is_package: bool = False) -> list[str]:
    """Every broken rule of one module, as `module:line: what`."""
    tree = ast.parse(source)
    found: list[tuple[int, str]] = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_MODULE_LINES:
        found.append((1, f"module of {num_lines} lines, at most {MAX_MODULE_LINES}"))
    for check in (_imports, _local_imports, _dynamic_imports, _environment, _words, _handlers, _pickles, _functions):
        found.extend(check(module, tree))
    found.extend(_flows(module, tree, is_package))
    return [f"{module}:{line}: {what}" for line, what in sorted(set(found))]


def _unit(name: str) -> str:
    """`hicache.tree.core` -> `tree`; the front door `hicache` itself -> ``."""
    return name.split(".")[1] if "." in name else ""


def _targets(node: ast.AST) -> list[str]:
    """Dotted names that an import statement may load; `from a import b` gives `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _first_party(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] in {*TREES, "bench", "tests"}


def _imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Ranks, relative imports, torch in storage, Triton outside kernels."""
    own = _unit(module)
    if own and own not in RANKS:
        yield 1, f"{own} has no rank; give it one in LEVELS"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import"
        for target in _targets(node):
            top, line = target.split(".")[0], getattr(node, "lineno", 1)
            if top in ("torch", "torchvision") and own == "storage":
                yield line, "storage imports torch"
            if top == "triton" and own != "kernels":
                yield line, "Triton is imported outside kernels"
            if top != "hicache" and _first_party(target):
                yield line, f"{top} is no part of the package by that name"
            if top == "hicache" and own:
                yield from ((line, what) for what in _rank_violation(own, _unit(target)))


def _rank_violation(own: str, other: str) -> Iterator[str]:
    if own == other:
        return
    if other not in RANKS:
        yield f"imports {other or 'hicache'} through the front door; name the module"
    elif RANKS[other] > RANKS[own]:
        yield f"{own} imports {other}, which stands above it"
    elif RANKS[other] == RANKS[own] and RANKS[own] not in SOCIABLE:
        yield f"{own} imports {other}, which stands beside it"


def _flows(module: str, tree: ast.Module, is_package: bool) -> Iterator[tuple[int, str]]:
    """A movement imports those below it alone."""
    own = module.split(".")[2:3]
    if not module.startswith("hicache.flow.") or is_package:
        return
    if own[0] not in FLOW_RANKS:
        yield 1, f"{own[0]} has no rank among the movements; give it one in FLOW_LEVELS"
        return
    for node in ast.walk(tree):
        for target in _targets(node):
            parts = target.split(".")
            other = parts[2:3]
            if parts[:2] != ["hicache", "flow"] or other == own or not other or other[0] not in FLOW_RANKS:
                continue
            if FLOW_RANKS[other[0]] >= FLOW_RANKS[own[0]]:
                yield getattr(node, "lineno", 1), f"{own[0]} imports {other[0]}, which is not below it"


def _functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _local_imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if not _unit(module):
        return  # the front door may load its parts when they are asked for
    for function in _functions_of(tree):
        for node in ast.walk(function):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            if relative or any(_first_party(target) for target in _targets(node)):
                yield getattr(node, "lineno", 1), "first-party import inside a function"


def _dynamic_imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`import_module` and `__import__` load optional third parties: a module that calls them names no first party in a
    string, so that a computed name cannot be one. The command line loads its commands by name: it is the top, and
    nothing can import it in a circle.
    """
    if not _unit(module) or module == "hicache.cli":
        return
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    names_own = any(re.fullmatch(r"[\w.]+", t) and (t[0] == "." or _first_party(t)) for t in texts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__") and names_own:
            yield node.lineno, "dynamic import of a first-party name"
        if isinstance(node, ast.Attribute) and node.attr == "modules" and _last_name(node.value) == "sys":
            yield node.lineno, "sys.modules is touched"


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _environment(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if module == "hicache.config":
        return
    aliases = _aliases(tree, "os")
    for node in ast.walk(tree):
        touched = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and _last_name(node.value) in aliases
        imported = isinstance(node, ast.ImportFrom) and node.module == "os"
        if touched or (imported and any(target.split(".")[1] in ENVIRONMENT for target in _targets(node))):
            yield getattr(node, "lineno", 1), "the environment is read outside config"


def _aliases(tree: ast.Module, module: str) -> set[str]:
    """Names under which a file knows a module: its own, and what `import … as` made of it."""
    names = {module}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == module and alias.asname}
    return names


def _words(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "hasattr":
            yield node.lineno, "hasattr"


def _handlers(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """A handler that catches everything raises, logs, counts, or hands the error on to a future."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _has_effect(node.body):
            yield node.lineno, "an except that catches everything neither raises nor logs nor counts"


def _is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(k is None or _last_name(k) in BROAD for k in kinds)


def _has_effect(body: list[ast.stmt]) -> bool:
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, (*Function.__args__, ast.Lambda, ast.ClassDef)):
            continue  # what is only defined here does not happen here
        if isinstance(node, ast.Raise):
            return True
        counts = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
        if counts and isinstance(node.target, (ast.Attribute, ast.Subscript)):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGING | COUNTING:
            return True
        pending.extend(ast.iter_child_nodes(node))
    return False


def _pickles(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    torch_names = _aliases(tree, "torch")
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        for target in _targets(node):
            if target.split(".")[0] in PICKLES or target in ("torch.load", "torch.save"):
                yield line, f"{target} unpickles or pickles"
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save") and _last_name(node.value) in torch_names:
            yield line, f"torch.{node.attr} unpickles or pickles"
        allowed = isinstance(node, ast.keyword) and node.arg == "allow_pickle" and node.value
        if allowed and not (isinstance(allowed, ast.Constant) and allowed.value is False):
            yield line, "allow_pickle unpickles or pickles"


def _functions(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines from `def` to the last statement, blank lines and comments included; decorators and docstring are not."""
    for function in _functions_of(tree):
        num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
        first = function.body[0]
        if ast.get_docstring(function, clean=False) is not None:
            num_lines -= (first.end_lineno or first.lineno) - first.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield function.lineno, f"{function.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def package_modules() -> list[tuple[str, Path]]:
    """(name as installed, file) of every module of the package."""
    modules = []
    for folder, prefix in TREES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules.append((".".join((prefix, *(p for p in parts if p != "__init__"))), path))
    return modules


def test_the_package_keeps_its_rules() -> None:
    """No module of hicache, kernels or storage breaks a rule of the architecture."""
    modules = package_modules()
    assert {"hicache", "hicache.config", "hicache.layout", "hicache.kernels", "hicache.storage"} <= {
        m for m, _ in modules
    }
    broken = [what for m, path in modules for what in check_source(m, path.read_text(), path.name == "__init__.py")]
    assert not broken, "\n".join(broken)


def test_benchmarks_stay_readable() -> None:
    """No module of bench is longer than a module may be, and each names the others as they install."""
    sources = {path.name: path.read_text() for path in (ROOT / "bench").glob("*.py")}
    assert "common.py" in sources
    assert {name for name, source in sources.items() if len(source.splitlines()) > MAX_MODULE_LINES} == set()
    targets = {
        target for source in sources.values() for node in ast.walk(ast.parse(source)) for target in _targets(node)
    }
    assert [target for target in targets if target.split(".")[0] in ("bench", "kernels", "storage", "tests")] == []


def _long_function(num_lines: int, docstring: str = "") -> str:
    return "@cache\ndef long():\n" + docstring + "    x = 1\n" * (num_lines - 1)


BAD = [
    ("hicache.tree.core", "import hicache.engine", "tree imports engine, which stands above it"),
    ("hicache.tree.core", "from hicache.alloc.paged import Paged", "tree imports alloc, which stands beside it"),
    ("hicache.host.arena", "from hicache import transfer", "host imports transfer, which stands beside it"),
    ("hicache.layout", "from hicache.device.mha import MHA", "layout imports device, which stands above it"),
    ("hicache.errors", "from hicache.config import EngineConfig", "errors imports config, which stands above it"),
    ("hicache.errors", "from hicache.storage import base", "errors imports storage, which stands above it"),
    ("hicache.metrics", "import hicache.layout", "metrics imports layout, which stands above it"),
    ("hicache.engine", "import hicache.cli", "engine imports cli, which stands above it"),
    (
        "hicache.kernels.scatter",
        "from hicache.config import kernel_choice",
        "kernels imports config, which stands above it",
    ),
    ("hicache.kernels.scatter", "import hicache.storage", "kernels imports storage, which stands beside it"),
    ("hicache.tree.core", "from hicache import RadixCache", "through the front door"),
    ("hicache.tree.core", "import hicache", "through the front door"),
    ("hicache.tree.core", "if TYPE_CHECKING:\n    import hicache.engine", "which stands above it"),
    ("hicache.novel", "x = 1", "novel has no rank"),
    ("hicache.flow.restore", "from hicache.flow.backup import Backup", "which is not below it"),
    ("hicache.flow.restore", "from hicache.flow import backup", "which is not below it"),
    ("hicache.flow.admit", "from hicache.flow.commit import Commit", "which is not below it"),
    ("hicache.flow.detour", "x = 1", "has no rank among the movements"),
    ("hicache.storage.codec", "import torch", "storage imports torch"),
    ("hicache.storage.codec", "from torch import Tensor", "storage imports torch"),
    ("hicache.device.mha", "import triton.language as tl", "Triton is imported outside kernels"),
    ("hicache.alloc.paged", "def f():\n    from triton import jit", "Triton is imported outside kernels"),
    ("hicache.engine", "from kernels.scatter import scatter", "kernels is no part of the package by that name"),
    ("hicache.engine", "import bench.common", "bench is no part of the package by that name"),
    ("hicache.serving.demo", "from hicache.bench.common import Case", "serving imports bench, which stands above it"),
    ("hicache.tree.core", "from .node import Node", "relative import"),
    ("hicache.engine", "def f():\n    from hicache.layout import PoolLayout", "import inside a function"),
    ("hicache.engine", "class A:\n    async def f(self):\n        import hicache.layout", "import inside a function"),
    ("hicache.tree.core", "import_module('hicache.engine')", "dynamic import"),
    ("hicache.tree.core", "import importlib\nimportlib.import_module(f'hicache.{name}')", "dynamic import"),
    ("hicache.tree.core", "UP = {'a': 'hicache.engine'}\nimport_module(UP[name])", "dynamic import"),
    ("hicache.tree.core", "__import__('hicache')", "dynamic import"),
    ("hicache.tree.core", "import sys\nx = sys.modules['hicache.engine']", "sys.modules"),
    ("hicache.host.arena", "import os\nx = os.environ['A']", "environment is read outside config"),
    ("hicache.host.arena", "import os as o\nx = o.getenv('A')", "environment is read outside config"),
    ("hicache.host.arena", "from os import environ as e", "environment is read outside config"),
    ("hicache.engine", "ok = hasattr(x, 'y')", "hasattr"),
    ("hicache.engine", "try:\n    f()\nexcept:\n    pass", "neither raises nor logs nor counts"),
    ("hicache.engine", "try:\n    f()\nexcept Exception as e:\n    x = e", "neither raises nor logs nor counts"),
    (
        "hicache.engine",
        "try:\n    f()\nexcept (OSError, BaseException):\n    x = 1",
        "neither raises nor logs nor counts",
    ),
    (
        "hicache.engine",
        "try:\n    f()\nexcept Exception:\n    def g():\n        raise",
        "neither raises nor logs nor counts",
    ),
    ("hicache.storage.codec", "import pickle", "pickle"),
    ("hicache.disk.pages", "from pickle import loads", "pickle"),
    ("hicache.disk.pages", "import torch as t\nt.load(path)", "torch.load"),
    ("hicache.disk.pages", "from torch import save", "torch.save"),
    ("hicache.disk.pages", "import numpy\nnumpy.load(path, allow_pickle=True)", "allow_pickle"),
    ("hicache.engine", "x = 1\n" * 401, "module of 401 lines"),
    ("hicache.engine", _long_function(51), "long has 51 lines"),
    ("hicache.engine", "def outer():\n" + "    def inner():\n" + "        x = 1\n" * 49, "outer has 51 lines"),
]

GOOD = [
    (
        "hicache.tree.core",
        "from hicache.tree.node import Node\nfrom hicache.layout import PoolLayout\nimport hicache.errors",
    ),
    ("hicache.cli", "from hicache.serving.demo import run\nfrom hicache.engine import CacheEngine"),
    ("hicache.factory", "from hicache.engine import CacheEngine\nfrom hicache.flow import admit"),
    ("hicache.config", "import os\nfrom hicache.metrics import Metrics\nx = os.environ.get('A')"),
    ("hicache.storage.base", "from hicache.errors import HiCacheError"),
    ("hicache.flow.restore", "from hicache.flow.context import EngineContext\nfrom hicache.host.pool import HostPool"),
    ("hicache.flow.admit", "from hicache.flow.restore import Restore"),
    ("hicache.kernels.scatter", "import torch\nimport triton\nimport triton.language as tl"),
    ("hicache.storage.codec", "import numpy\nimport zstandard\nfrom hicache.storage.base import PageStore"),
    ("hicache.device.saver", "import importlib\nsaver = importlib.import_module('torch_memory_saver')"),
    ("hicache.storage.packages", "def optional(name):\n    return import_module(name)\nlmdb = optional('lmdb')"),
    ("hicache.engine", "try:\n    f()\nexcept Exception:\n    raise ValueError from None"),
    ("hicache.engine", "try:\n    f()\nexcept Exception:\n    logger.exception('lost')"),
    ("hicache.engine", "try:\n    f()\nexcept Exception:\n    self.failures.value += 1"),
    ("hicache.engine", "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
    ("hicache.engine", "import numpy\nnumpy.load(path, allow_pickle=False)\nx.load(path)"),
    ("hicache.engine", "x = 1\n" * 400),
    ("hicache.engine", _long_function(50)),
    ("hicache.engine", _long_function(50, '    """One\n\n    two\n    """\n')),
    ("hicache", "from importlib import import_module\ndef __getattr__(name):\n    return import_module(PLACES[name])"),
    ("hicache", "from hicache.engine import CacheEngine\nfrom hicache.prefix_cache import RadixCache"),
]


@pytest.mark.parametrize(("module", "source", "expected"), BAD, ids=[f"{m}-{w[:32]}" for m, _, w in BAD])
def test_each_rule_finds_what_breaks_it(module: str, source: str, expected: str) -> None:
    """A source that breaks one rule is reported, with that rule's words and the module's name."""
    found = check_source(module, source)
    assert any(expected in what for what in found), found
    assert all(what.startswith(f"{module}:") for what in found)


@pytest.mark.parametrize(("module", "source"), GOOD, ids=[m for m, _ in GOOD])
def test_what_the_rules_allow_is_not_reported(module: str, source: str) -> None:
    """A source that keeps to the rules gives no report."""
    assert check_source(module, source) == []
