"""KV-cache methods. `sejax.methods.<name>` is the function <name> in <name>.py, found by its name: there is no table of methods."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from sejax.cache.method import combine
from sejax.types import Method

_SECTIONS = ("Family", "Paper", "Differs", "Keeps", "Args")


class _Package(types.ModuleType):
    """Importing a submodule would hide the factory of the same name: the factory is put in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        inside = getattr(value, name, None) if isinstance(value, types.ModuleType) else None
        super().__setattr__(name, inside if callable(inside) else value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{name}")
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted([*globals(), *_modules()])


@functools.cache
def _modules() -> tuple[str, ...]:
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


@functools.cache
def names() -> tuple[str, ...]:
    """Every method, sorted: the modules here that hold a function of their own name, annotated to return a Method."""
    return tuple(name for name in _modules() if _is_factory(__getattr__(name)))


def _is_factory(value: Any) -> bool:
    return inspect.isfunction(value) and typing.get_type_hints(value).get("return") is Method


def method(spec: str | Method, **arguments: Any) -> Method:
    """The method that `spec` names, "name" or "name:key=value,key=value", with further hyper-parameters as keywords.

    Values in the string are read by the type the factory declares: whole numbers, numbers, true/false, text, tuples "(1,2)"
    and "none". Raises ValueError with a sentence: an unknown method or hyper-parameter (it names the closest), one given twice,
    one that is missing, a value of the wrong type; the factory itself refuses values out of range. "first + second" combines
    two methods that decide different things, as cache.method.combine does.
    """
    if isinstance(spec, Method):
        if arguments:
            raise ValueError(f"{spec} is a finished method: its hyper-parameters cannot be changed; give its name as text instead.")
        return spec
    first, plus, second = spec.partition("+")
    if plus:
        if arguments:
            raise ValueError(f"{spec} names two methods: write each one's hyper-parameters in the text, as in name:key=value + name.")
        return combine(method(first), method(second))
    name, _, tail = spec.partition(":")
    name, factory = _factory(name)
    given: dict[str, Any] = {}
    for key, value in [*_pairs(name, tail), *arguments.items()]:
        if key in given:
            raise ValueError(f"Method {name}: {key} is given twice.")
        given[key] = value
    declared = _declared(factory)
    unknown = next((key for key in given if key not in declared), None)
    if unknown is not None:
        listed = ", ".join(declared) or "none"
        raise ValueError(f"Method {name} has no hyper-parameter {unknown!r}.{_closest(unknown, declared)} It has: {listed}.")
    missing = [key for key, p in inspect.signature(factory).parameters.items() if p.default is p.empty and key not in given]
    if missing:
        raise ValueError(f"Method {name} needs {', '.join(missing)}, as in {name}:{missing[0]}=value.")
    return factory(**{key: _value(name, key, value, declared[key]) for key, value in given.items()})


def calibration(name: str, **options: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """How a method measures what it must know of a model: (trace, texts) -> the contents of its file.

    It is the function `calibrate` of the method's module: trace(ids) -> (LayerSpec, Qkv [1,T,...]) of each layer in turn, texts a list
    of token id lists; options, as text or values, are its keyword arguments. Raises ValueError for a method without one, an unknown
    option, or a value of the wrong type.
    """
    name, _ = _factory(name)
    function = getattr(importlib.import_module(f"{__name__}.{name}"), "calibrate", None)
    if function is None:
        raise ValueError(f"Method {name} needs no calibration: use it as it is.")
    hints = typing.get_type_hints(function)
    declared = {key: hints[key] for key, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    unknown = next((key for key in options if key not in declared), None)
    if unknown is not None:
        listed = ", ".join(f"--{key}" for key in declared) or "none"
        raise ValueError(f"Calibration of {name} has no option --{unknown}.{_closest(unknown, declared)} It has: {listed}.")
    return functools.partial(function, **{key: _value(name, key, value, declared[key]) for key, value in options.items()})


def describe(name: str) -> dict[str, Any]:
    """What a method's docstring and signature say: name, summary, text, family, paper, differs, keeps, args, defaults.

    args: hyper-parameter -> its text; defaults: hyper-parameter -> default (inspect.Parameter.empty where it must be given).
    """
    name, factory = _factory(name)
    sections = _split(inspect.getdoc(factory) or "")
    summary, _, text = sections.pop("", "").partition("\n")
    found: dict[str, Any] = {"name": name, "summary": summary.strip(), "text": text.strip()}
    found |= {section.lower(): " ".join(sections.get(section, "").split()) for section in _SECTIONS[:-1]}
    found["args"] = _arguments(sections.get("Args", ""))
    found["defaults"] = {key: parameter.default for key, parameter in inspect.signature(factory).parameters.items()}
    return found


def _factory(name: str) -> tuple[str, Callable[..., Method]]:
    name = name.strip()
    if name not in names():
        raise ValueError(f"There is no method {name!r}.{_closest(name, names())} Methods: {', '.join(names()) or 'none'}.")
    return name, __getattr__(name)


def _closest(word: str, known: typing.Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f" Did you mean {match[0]!r}?" if match else ""


def _pairs(name: str, text: str) -> list[tuple[str, str]]:
    """Reads "a=1,b=(2,3)" as [("a", "1"), ("b", "(2,3)")]: commas inside parentheses do not separate."""
    pairs = []
    for part in re.split(r",(?![^()]*\))", text) if text.strip() else []:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"Method {name}: {part.strip()!r} should read key=value, as in {name}:key=value,key=value.")
        pairs.append((key.strip().replace("-", "_"), value.strip()))
    return pairs


def _declared(factory: Callable[..., Method]) -> dict[str, Any]:
    hints = typing.get_type_hints(factory)
    return {key: hints.get(key, Any) for key in inspect.signature(factory).parameters}


def _value(name: str, key: str, value: Any, declared: Any) -> Any:
    """A value checked against, or read from text as, the declared type; ValueError with a sentence where it does not fit."""
    for choice in _choices(declared):
        fits, result = _fit(value, choice)
        if fits:
            return result
    wanted = " or ".join(_shown(choice) for choice in _choices(declared))
    raise ValueError(f"Method {name}: {key} must be {wanted}, not {value!r}.")


def _choices(declared: Any) -> tuple[Any, ...]:
    return typing.get_args(declared) if typing.get_origin(declared) in (typing.Union, types.UnionType) else (declared,)


def _fit(value: Any, declared: Any) -> tuple[bool, Any]:
    origin = typing.get_origin(declared) or declared
    if origin is Literal:
        matching = [v for v in typing.get_args(declared) if value in (v, str(v))]
        return bool(matching), matching[0] if matching else value
    if origin in (tuple, list) and isinstance(value, (str, tuple, list)):
        return _fit_tuple(value, declared)
    if isinstance(value, str) and origin in _READ:
        return _read(value, origin)
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool), value
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return origin is Any or (isinstance(origin, type) and isinstance(value, origin)), value


def _fit_tuple(value: Any, declared: Any) -> tuple[bool, Any]:
    items = [v.strip() for v in value.strip("()").split(",") if v.strip()] if isinstance(value, str) else value
    inner = (typing.get_args(declared) or (Any,))[0]
    fitted = [_fit(item, inner) for item in items]
    return all(fits for fits, _ in fitted), tuple(item for _, item in fitted)


_READ: dict[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False, "1": True, "0": False}[text.lower()],
    type(None): lambda text: {"none": None}[text.lower()],
}


def _read(text: str, kind: type) -> tuple[bool, Any]:
    try:
        return True, _READ[kind](text)
    except (ValueError, KeyError):
        return False, None


def _shown(declared: Any) -> str:
    origin = typing.get_origin(declared) or declared
    if origin is Literal:
        return " or ".join(repr(v) for v in typing.get_args(declared))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none", tuple: "a tuple"}
    return words.get(origin, getattr(origin, "__name__", str(origin)))


def _split(doc: str) -> dict[str, str]:
    """A docstring by its sections: {"": everything before the first, "Paper": ..., ...}."""
    sections, current = {"": ""}, ""
    for line in doc.splitlines():
        head = re.match(rf"({'|'.join(_SECTIONS)}):\s*(.*)", line)
        if head:
            current, line = head[1], head[2]
            sections[current] = ""
        sections[current] += line + "\n"
    return {key: text.strip("\n") for key, text in sections.items()}


def _arguments(text: str) -> dict[str, str]:
    """`name: text` lines, continued by lines that are indented deeper than the first."""
    found: dict[str, str] = {}
    margin = min((len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip()), default=0)
    for line in text.splitlines():
        head = re.match(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line[margin:])
        if head:
            found[head[1]] = head[2]
        elif found and line.strip():
            found[next(reversed(found))] += " " + line.strip()
    return found
