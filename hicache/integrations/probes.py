"""Checks whether an installed server has the names, fields and signatures that a plug-in of hicache uses.

A plug-in was tested with some releases of its server. Under any other release, these checks find a changed interface
before the server serves a request. The checks cannot detect a method whose meaning changed, so `versions` gives each
untested release a separate store.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

_FAILS = (ImportError, AttributeError, OSError, RuntimeError)  # errors of an import or a missing library


class Call(NamedTuple):
    """The arguments of a call: the number of positional arguments, and the names of the keyword arguments."""

    num_positional: int = 0
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Features:
    """The features of a server that a plug-in uses. A module is "package.module"; an object is "package.module:Name".

    `names`: attributes of modules and classes, including fields that a constructor sets. `calls`: functions and classes
    that the plug-in calls.
    """

    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    calls: Mapping[str, Call] = field(default_factory=dict)


def missing_features(features: Sequence[Features]) -> list[str]:
    """Return one sentence for each feature that the installed server lacks."""
    return [text for one in features for text in (*_missing_names(one.names), *_wrong_calls(one.calls))]


def wrong_overrides(features: Sequence[Features], package: str) -> list[str]:
    """Return one sentence for each method of the plug-in's imported classes that does not match its base class in the
    server: a missing abstract method, or a method that refuses a parameter which the server may pass. `features` names
    the base classes; `package` is the package of the plug-in."""
    bases: list[type[Any]] = [
        found for one in features for path in one.names if isinstance(found := _object(path), type)
    ]
    own = {each for base in bases for each in _subclasses(base) if each.__module__.startswith(package)}
    return sorted({text for each in own for base in bases for text in _wrong_methods(each, base, package)})


def _missing_names(names: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for path, attributes in names.items():
        try:
            owner = _object(path)
        except _FAILS as error:
            yield f"{path} is missing ({error})"
            continue
        yield from (f"{path} has no {name}" for name in attributes if not _has(owner, name))


def _wrong_calls(calls: Mapping[str, Call]) -> Iterator[str]:
    for path, call in calls.items():
        try:
            signature = inspect.signature(_object(path))
            signature.bind(*[None] * call.num_positional, **dict.fromkeys(call.keywords))
        except (*_FAILS, TypeError) as error:
            yield f"{path} cannot be called as hicache does ({error})"


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def _wrong_methods(own: type, base: type, package: str) -> Iterator[str]:
    """Yield one sentence for each method of `own`, or of its base classes in the plug-in, that does not match the
    method of `base`."""
    if not issubclass(own, base):
        return
    abstract = sorted(getattr(own, "__abstractmethods__", ()))
    yield from (f"{own.__name__} lacks {name}, which the server calls" for name in abstract)
    of_plug_in = [each for each in own.__mro__ if each.__module__.startswith(package)]
    for name in {name for each in of_plug_in for name in vars(each)} - {"__init__"}:
        if all(inspect.isroutine(inspect.getattr_static(each, name, None)) for each in (own, base)):
            refused = _refused(inspect.signature(getattr(own, name)), inspect.signature(getattr(base, name)))
            if refused:
                what = getattr(own, name).__qualname__
                yield f"{what} does not match {base.__module__}:{base.__name__}: {', '.join(refused)}"


def _refused(own: inspect.Signature, servers: inspect.Signature) -> list[str]:
    """Return the parameters that the server may pass but the plug-in's method does not accept, and the required
    parameters of the plug-in's method that the server never passes."""
    kinds = {parameter.kind for parameter in own.parameters.values()}
    takes_any_name, takes_any_number = inspect.Parameter.VAR_KEYWORD in kinds, inspect.Parameter.VAR_POSITIONAL in kinds
    given = {n: p for n, p in servers.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    accepted = {n: p for n, p in own.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    found = [name for name in given if name not in accepted and not takes_any_name and not takes_any_number]
    found += [name for name, p in accepted.items() if name not in given and p.default is p.empty]
    both = [name for name in given if name in accepted]
    return found or ([] if both == [name for name in accepted if name in given] else both)


def _object(path: str) -> Any:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return attrgetter(name)(found) if name else found


def _has(owner: object, name: str) -> bool:
    """Return whether `owner` has the attribute `name`. For a class, attributes of its instances count too."""
    if not isinstance(owner, type):
        return name in dir(owner)
    return (
        name in dir(owner)
        or any(name in inspect.get_annotations(base) for base in owner.__mro__)
        or name in {*_set_by_constructors(owner.__mro__)}
    )


def _set_by_constructors(classes: Iterable[type]) -> Iterator[str]:
    for init in (vars(each).get("__init__") for each in classes):
        if inspect.isfunction(init):
            steps = dis.get_instructions(inspect.unwrap(init))
            yield from (str(step.argval) for step in steps if step.opname == "STORE_ATTR")
