"""The rules of the architecture, checked on the syntax trees of the package as it is installed.

`check_source` takes the name and text of one module and lists the broken rules. The second half of this file calls it
with bad sources, so that a rule that no longer works is noticed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = {"hicache": "hicache", "kernels": "hicache.kernels", "storage": "hicache.storage"}

# Units from the top level down. A unit may import itself and every unit of a lower level.
LEVELS = (
    ("bench",),
    ("cli", "__main__", "doctor", "serving", "planning", "store_command", "integrations", "monitoring"),
    ("engine", "build", "kv_events", "prefix_cache"),
    ("flow", "replay"),
    ("pages", "alloc", "device", "transfer", "host", "stores"),
    ("layout",),
    ("tiers",),
    ("config", "metrics"),
    ("kernels", "storage"),
    ("console", "process", "releases"),
    ("errors", "public_names"),
)
RANKS = {unit: len(LEVELS) - level for level, units in enumerate(LEVELS) for unit in units}
# Levels whose units may also import one another. The six tiers, kernels and storage may not import one another.
SOCIABLE = {RANKS["cli"], RANKS["engine"], RANKS["config"]}

# Transfers within flow/, from the top level down. A transfer imports those of lower levels.
FLOW_LEVELS = (
    ("upkeep", "stop"),
    ("admit", "commit"),
    ("staged_load",),
    ("copies",),
    ("reads", "writes"),
    ("located", "cost"),
    ("context",),
    ("components",),
    ("lease",),
    ("page_transfer", "write_policy"),
    ("prompt", "packing"),
)
FLOW_RANKS = {name: len(FLOW_LEVELS) - level for level, names in enumerate(FLOW_LEVELS) for name in names}

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
EFFECTS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log", "inc", "increment"}
EFFECTS |= {"set_exception"}
BROAD = {"Exception", "BaseException"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Import = ast.Import | ast.ImportFrom


def check_source(module: str, source: str, is_package: bool = False) -> list[str]:
    """Every broken rule of one module, as `module:line: rule`."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, Import) and any(map(_first_party, _targets(node)))]
    found = [(1, what) for what in _names(module, nodes, is_package)]
    for node in nodes:
        line = getattr(node, "lineno", 1)
        for target in _targets(node):
            found.extend((line, what) for what in (*_import(module, target), *_flow(module, target, is_package)))
        found.extend((line, what) for what in _statement(module, node))
        if isinstance(node, Function):
            found.extend(_function(module, node, imports))
    return [f"{module}:{line}: {what}" for line, what in sorted(set(found))]


def _unit(name: str) -> str:
    """`hicache.pages.tree` -> `pages`; the top module `hicache` itself -> ``."""
    return name.split(".")[1] if "." in name else ""


def _transfer_module(name: str) -> str:
    """`hicache.flow.admit` -> `admit`; modules outside of flow/ -> ``."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["hicache", "flow"] and len(parts) > 2 else ""


def _last_name(node: ast.AST | None) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _targets(node: ast.AST) -> list[str]:
    """Dotted names that an import statement may load; `from a import b` gives `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _first_party(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] in {*TREES, "bench", "tests"}


def _names(module: str, nodes: list[ast.AST], is_package: bool) -> Iterator[str]:
    """Check the levels of imports. `import_module` and `__import__` may only load optional third-party packages. The
    command line loads its commands by name; the command line is the top level, so that no circle is possible.
    """
    if _unit(module) and _unit(module) not in RANKS:
        yield f"{_unit(module)} has no rank; give it one in LEVELS"
    if _transfer_module(module) and not is_package and _transfer_module(module) not in FLOW_RANKS:
        yield f"{_transfer_module(module)} has no rank among the transfers; give it one in FLOW_LEVELS"
    if _unit(module) and module != "hicache.cli" and not module.endswith(".command"):  # the top: no circle is possible
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        names_own = any(re.fullmatch(r"[\w.]+", text) and (text[0] == "." or _first_party(text)) for text in texts)
        calls = [_last_name(node.func) for node in nodes if isinstance(node, ast.Call)]
        if names_own and {"import_module", "__import__"} & set(calls):
            yield "dynamic import of a first-party name"


def _import(module: str, target: str) -> Iterator[str]:
    """Check one import: levels, torch in storage, Triton outside kernels, the environment outside config, and
    pickles."""
    own, (top, *rest) = _unit(module), target.split(".")
    other = rest[0] if rest else ""
    if top in ("torch", "torchvision") and own == "storage":
        yield "storage imports torch"
    if top == "triton" and own != "kernels":
        yield "Triton is imported outside kernels"
    if top in PICKLES or target in ("torch.load", "torch.save"):
        yield f"{target} unpickles or pickles"
    if top == "os" and other in ENVIRONMENT and module != "hicache.config.environment":
        yield "the environment is read outside config/environment.py"
    if _first_party(target) and top != "hicache":
        yield f"{top} is no part of the package by that name"
    if top != "hicache" or own in ("", other) or own not in RANKS:
        return
    if other not in RANKS:
        yield f"imports {other or 'hicache'} through the front door; name the module"
    elif RANKS[other] > RANKS[own]:
        yield f"{own} imports {other}, which stands above it"
    elif RANKS[other] == RANKS[own] and RANKS[own] not in SOCIABLE:
        yield f"{own} imports {other}, which stands beside it"


def _flow(module: str, target: str, is_package: bool) -> Iterator[str]:
    """Check that a transfer only imports transfers of lower levels."""
    own, other = _transfer_module(module), _transfer_module(target)
    if own != other and not is_package and FLOW_RANKS.get(other, 0) >= FLOW_RANKS.get(own, 99):
        yield f"{own} imports {other}, which is not below it"


def _statement(module: str, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.level:
        yield "relative import"
    if isinstance(node, ast.Import) and any(alias.asname and alias.name in ("os", "torch") for alias in node.names):
        yield "os and torch keep their names, by which these rules find them"
    if isinstance(node, ast.Name) and node.id == "hasattr":
        yield "hasattr"
    if isinstance(node, ast.Attribute):
        name = f"{_last_name(node.value)}.{node.attr}"
        if name == "sys.modules" and module not in ("hicache", "hicache.cli"):
            yield "sys.modules is touched"
        if name in ("torch.load", "torch.save"):
            yield f"{name} unpickles or pickles"
        if name.startswith("os.") and node.attr in ENVIRONMENT and module != "hicache.config.environment":
            yield "the environment is read outside config/environment.py"
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", None) is not False:
        yield "allow_pickle unpickles or pickles"
    if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _has_effect(node.body):
        yield "an except that catches everything neither raises nor logs nor counts"


def _is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(k is None or _last_name(k) in BROAD for k in kinds)


def _has_effect(body: list[ast.stmt]) -> bool:
    """Whether a handler raises, logs, counts, or sets the error of a future."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, (*Function.__args__, ast.Lambda, ast.ClassDef)):
            continue  # a nested definition does not run here
        counts = isinstance(node, ast.AugAssign) and isinstance(node.target, (ast.Attribute, ast.Subscript))
        calls = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EFFECTS
        if isinstance(node, ast.Raise) or counts or calls:
            return True
        pending.extend(ast.iter_child_nodes(node))
    return False


def _function(module: str, function: Function, imports: list[Import]) -> Iterator[tuple[int, str]]:
    """Check for imports inside of functions, which only the module `hicache` may have."""
    for node in imports if _unit(module) else ():
        if function.lineno <= node.lineno <= (function.end_lineno or function.lineno):
            yield node.lineno, "first-party import inside a function"


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
    assert {"hicache", "hicache.config", "hicache.layout", "hicache.kernels", "hicache.storage"} <= set(dict(modules))
    broken = [what for m, path in modules for what in check_source(m, path.read_text(), path.name == "__init__.py")]
    assert not broken, "\n".join(broken)
    top = sorted(path.stem for path in (ROOT / "hicache").glob("*.py"))
    assert len(top) <= 10, f"beside __init__ the top level has fewer than ten modules, not {top}"


def test_the_page_of_architecture_draws_the_levels() -> None:
    """The pictures of the packages and of flow/ on the page have these levels, with a bar between packages that may not
    import one another."""
    page = (ROOT / "docs/architecture.md").read_text()
    packages = page.partition("## The packages")[2].partition("\n## ")[0]
    drawn = re.findall(r"^\| (\w.*?) +\|  ", packages, re.MULTILINE)
    assert [tuple(re.findall(r"\w+", line)) for line in drawn] == [
        tuple(unit for unit in level if unit != "__main__") for level in LEVELS[1:]
    ]
    for line, (first, *others) in zip(drawn, LEVELS[1:], strict=True):
        assert ("|" in line) == (bool(others) and RANKS[first] not in SOCIABLE), line
    flow = page.partition("## The layers of flow/")[2].partition("\n## ")[0]
    assert re.findall(r"^(\w+(?:, \w+)*) {2,}", flow, re.MULTILINE) == [", ".join(names) for names in FLOW_LEVELS]


def test_benchmarks_import_the_package_as_it_installs() -> None:
    """The modules of bench import one another, kernels and storage by their names below `hicache`."""
    sources = [path.read_text() for path in (ROOT / "bench").rglob("*.py")]
    targets = {target for source in sources for node in ast.walk(ast.parse(source)) for target in _targets(node)}
    assert targets
    assert [target for target in targets if _first_party(target) and not target.startswith("hicache")] == []


def _handler(kinds: str, body: str) -> str:
    return f"try:\n    f()\nexcept{kinds}:\n    {body}"


# By rule: (module, source, expected text).
BAD = [
    ("pages.tree", "import hicache.engine", "pages imports engine, which stands above it"),
    ("pages.table", "from hicache.alloc.paged import Paged", "pages imports alloc, which stands beside it"),
    ("pages.order", "from hicache.flow.lease import Lease", "pages imports flow, which stands above it"),
    ("errors", "from hicache.storage import base", "errors imports storage, which stands above it"),
    ("pages.tree", "from hicache import RadixCache", "through the front door"),
    ("pages.tree", "if TYPE_CHECKING:\n    import hicache.engine", "which stands above it"),
    ("novel", "x = 1", "novel has no rank"),
    ("flow.copies", "from hicache.flow.admit import Admit", "which is not below it"),
    ("flow.detour", "x = 1", "has no rank among the transfers"),
    ("storage.codec", "from torch import Tensor", "storage imports torch"),
    ("alloc.paged", "def f():\n    from triton import jit", "Triton is imported outside kernels"),
    ("engine", "from kernels.scatter import scatter", "kernels is no part of the package by that name"),
    ("serving.demo", "from hicache.bench.common import Case", "serving imports bench, which stands above it"),
    ("pages.tree", "from .node import Node", "relative import"),
    ("engine", "class A:\n    async def f(self):\n        import hicache.layout", "import inside a function"),
    ("pages.tree", "import importlib\nimportlib.import_module(f'hicache.{name}')", "dynamic import"),
    ("pages.tree", "UP = {'a': 'hicache.engine'}\nimport_module(UP[name])", "dynamic import"),
    ("pages.tree", "import sys\nx = sys.modules['hicache.engine']", "sys.modules"),
    ("host.arena", "import os\nx = os.environ['A']", "environment is read outside config/environment.py"),
    ("host.arena", "import os as o\nx = o.getenv('A')", "keep their names"),
    ("engine", "ok = hasattr(x, 'y')", "hasattr"),
    ("engine", _handler("", "pass"), "neither raises nor logs nor counts"),
    ("engine", _handler(" Exception", "def g():\n        raise"), "neither raises nor logs nor counts"),
    ("disk.pages", "from pickle import loads", "pickle"),
    ("disk.pages", "import torch\ntorch.load(path)", "torch.load"),
    ("disk.pages", "import numpy\nnumpy.load(path, allow_pickle=True)", "allow_pickle"),
]


def test_each_rule_finds_what_breaks_it() -> None:
    """A source that breaks one rule is reported with the text of that rule."""
    for module, source, expected in BAD:
        found = check_source(f"hicache.{module}", source)
        assert any(expected in what for what in found), (module, source, found)
