"""Strict configuration: YAML files and dotted overrides to nested frozen dataclasses, and back.

The dataclass is the schema. Every key must be a field and every value must have the field's type; what does not is
named with its file and line. Known types: int, float, bool, str, Path, Literal, tuples, Optional and other unions,
mappings with text keys, and nested dataclasses.

A field of type `Mapping[str, Any]` may carry `metadata={"partial": Other, "extra": ("preset",)}`: its keys must then be
fields of the dataclass `Other` (or one of the extra ones) and are checked as such, but none of them is required.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from jdlite.errors import ConfigError

C = TypeVar("C")
_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))


@dataclasses.dataclass
class _Item:
    """A value together with where it was written.

    Attributes:
        value: a dict of names to items, a list of items, or the text of a scalar.
        where: begins error messages, for example `run.yaml, line 3`.
        tag: YAML's guess at the type of a scalar.
        quoted: the scalar is in quotes, so it is a text whatever it looks like.
    """

    value: dict[str, _Item] | list[_Item] | str
    where: str
    tag: str = _STR
    quoted: bool = False

    def __str__(self) -> str:
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        return "null" if self.tag == _NULL else repr(self.value) if self.tag == _STR else self.value


def load(cls: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """Read a YAML file into a dataclass.

    Example: `load(TrainConfig, "run.yaml", ["optimizer.learning_rate=1e-4", "drafter.tap_layers=[0, 5, 11]"])`.

    Args:
        cls: a dataclass, the schema.
        path: of the YAML file.
        overrides: `dotted.name=value`, applied in order; the value is read as YAML and by the field's type.

    Raises:
        ConfigError: the file cannot be read or is no YAML, a key is unknown, repeated or missing, a value has the wrong
            type, or the dataclass refuses a value.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} cannot be read ({error}); give a YAML file.") from error
    tree = _compose(text, str(path))
    for override in overrides:
        _override(tree, override)
    return _read(cls, tree, "", {})


def from_dict(cls: type[C], values: Mapping[str, Any], overrides: Sequence[str] = ()) -> C:
    """Build a dataclass from plain values, as `to_dict` gives them, with the checks of `load`.

    Raises:
        ConfigError: as in `load`.
    """
    tree = _wrap(values)
    for override in overrides:
        _override(tree, override)
    return _read(cls, tree, "", {})


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON and YAML values; `from_dict` gives it back."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


# From text to items.


def _compose(text: str, source: str) -> _Item:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML ({problem}); check indentation, colons and quotes.") from error
    return _Item({}, source) if node is None else _from_node(node, source)


def _from_node(node: yaml.Node, source: str) -> _Item:
    where = f"{source}, line {node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        return _Item(node.value, where, node.tag, node.style in ("'", '"', "|", ">"))
    if isinstance(node, yaml.SequenceNode):
        return _Item([_from_node(child, source) for child in node.value], where)
    items: dict[str, _Item] = {}
    for key, value in node.value:
        at = f"{source}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{at}: a key must be a name; remove the list or mapping that is used as one.")
        if key.value in items:
            raise ConfigError(f"{at}: {key.value!r} is given twice; keep one of them.")
        items[key.value] = _from_node(value, source)
        # A nested block begins below its key; people look for the key.
        items[key.value].where = at
    return _Item(items, where)


def _wrap(value: Any) -> _Item:
    if isinstance(value, Mapping):
        return _Item({str(name): _wrap(v) for name, v in value.items()}, "configuration")
    if isinstance(value, list | tuple):
        return _Item([_wrap(v) for v in value], "configuration")
    kinds = ((bool, _BOOL), (int, _INT), (float, _FLOAT), (type(None), _NULL))
    tag = next((tag for kind, tag in kinds if isinstance(value, kind)), _STR)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return _Item(text, "configuration", tag, quoted=tag == _STR)


def _override(tree: _Item, override: str) -> None:
    name, equals, text = override.partition("=")
    names = name.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"an override must be written dotted.name=value: got {override!r}.")
    where = f"override {override!r}"
    for depth, part in enumerate(names[:-1]):
        assert isinstance(tree.value, dict)
        child = tree.value.get(part)
        if child is None or child.tag == _NULL:
            child = tree.value[part] = _Item({}, where)
        if not isinstance(child.value, dict):
            raise ConfigError(f"{where}: {'.'.join(names[: depth + 1])} is {child}, not a group of settings.")
        tree = child
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: the value is not valid YAML; put texts with special signs in quotes.") from error
    item = _Item("", where, _NULL) if node is None else _from_node(node, "")
    assert isinstance(tree.value, dict)
    tree.value[names[-1]] = _at(item, where)


def _at(item: _Item, where: str) -> _Item:
    """The item and all below it with another origin."""
    if isinstance(item.value, dict):
        return _Item({name: _at(child, where) for name, child in item.value.items()}, where)
    if isinstance(item.value, list):
        return _Item([_at(child, where) for child in item.value], where)
    return dataclasses.replace(item, where=where)


# From items to typed values.


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _read(kind: Any, item: _Item, name: str, metadata: Mapping[str, Any]) -> Any:
    """The value of an item as a type.

    Args:
        kind: a type annotation.
        item: the value as written.
        name: dotted name, for messages.
        metadata: of the field.
    """
    if kind is Any:
        return _guess(item)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, item, name)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _read_literal(arguments, item, name)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, item, name, metadata)
    if origin in (tuple, list, collections.abc.Sequence):
        return _read_tuple(arguments if origin is tuple else (*arguments, Ellipsis), item, name)
    if origin in (dict, collections.abc.Mapping) or kind in (dict, Mapping):
        return _read_mapping(arguments, item, name, metadata)
    return _read_scalar(kind, item, name)


def _wrong(item: _Item, name: str, expected: str) -> ConfigError:
    return ConfigError(f"{item.where}: {name} must be {expected}: got {item}.")


def _read_dataclass(cls: Any, item: _Item, name: str) -> Any:
    if item.tag == _NULL:
        item = _Item({}, item.where)  # a group whose lines are all commented out
    if not isinstance(item.value, dict):
        raise _wrong(item, name or "the configuration", "a mapping of settings")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    values = _read_fields(cls, fields, item, name)
    missing = [
        field.name
        for field in fields.values()
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        group = f" in {name}" if name else ""
        raise ConfigError(f"{item.where}: {', '.join(missing)} is missing{group}; give it a value.")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{item.where}: {name + ': ' if name else ''}{error}") from error


def _read_fields(cls: Any, fields: Mapping[str, dataclasses.Field], item: _Item, name: str) -> dict[str, Any]:
    assert isinstance(item.value, dict)
    hints, values = _hints(cls), {}
    for key, child in item.value.items():
        if key not in fields:
            group = f" in {name}" if name else ""
            raise ConfigError(f"{child.where}: {key!r} is unknown{group}; known are {', '.join(fields)}.")
        values[key] = _read(hints[key], child, _join(name, key), fields[key].metadata)
    return values


def _read_mapping(arguments: tuple, item: _Item, name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    if item.tag == _NULL:
        return {}
    if not isinstance(item.value, dict):
        raise _wrong(item, name, "a mapping")
    cls, extra = metadata.get("partial"), metadata.get("extra", ())
    if cls is None:
        kind = arguments[1] if len(arguments) == 2 else Any
        return {key: _read(kind, child, _join(name, key), {}) for key, child in item.value.items()}
    known = {field.name: field for field in dataclasses.fields(cls) if field.init}
    values: dict[str, Any] = {}
    for key, child in item.value.items():
        if key in extra:
            values[key] = _guess(child)
        elif key in known:
            values[key] = _read(_hints(cls)[key], child, _join(name, key), known[key].metadata)
        else:
            names = ", ".join([*extra, *known])
            raise ConfigError(f"{child.where}: {key!r} is unknown in {name}; known are {names}.")
    return values


def _read_tuple(arguments: tuple, item: _Item, name: str) -> tuple:
    if not isinstance(item.value, list):
        raise _wrong(item, name, "a list, written [a, b]")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        kinds = [arguments[0]] * len(item.value)
    else:
        kinds = list(arguments)
        if len(kinds) != len(item.value):
            raise ConfigError(f"{item.where}: {name} must have {len(kinds)} entries: got {len(item.value)}.")
    return tuple(
        _read(kind, child, f"{name}[{i}]", {}) for i, (kind, child) in enumerate(zip(kinds, item.value, strict=True))
    )


def _read_literal(choices: tuple, item: _Item, name: str) -> Any:
    for choice in choices:
        # Compared as text, so that `off` and `no`, which YAML takes for booleans, can be choices.
        same = item.value == (str(choice).lower() if isinstance(choice, bool) else str(choice))
        if same and (isinstance(choice, str) or not item.quoted):
            return choice
    raise _wrong(item, name, f"one of {', '.join(str(choice) for choice in choices)}")


def _read_union(kinds: tuple, item: _Item, name: str, metadata: Mapping[str, Any]) -> Any:
    if item.tag == _NULL and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return _read(kinds[0], item, name, metadata)
    for kind in kinds:
        try:
            return _read(kind, item, name, metadata)
        except ConfigError:
            continue
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise _wrong(item, name, names)


def _read_scalar(kind: Any, item: _Item, name: str) -> Any:
    text, plain = item.value, not item.quoted
    if not isinstance(text, str):
        raise _wrong(item, name, f"{_WORDS.get(kind, 'a value')}")
    if kind is bool:
        if plain and text in ("true", "false"):
            return text == "true"
    elif kind is int:
        if plain and item.tag == _INT:
            return int(yaml.safe_load(text))
    elif kind is float:
        # YAML 1.1 takes 1e-4 for a text, since it has no dot.
        if plain and item.tag in (_INT, _FLOAT, _STR):
            try:
                return float(yaml.safe_load(text))
            except (TypeError, ValueError):
                pass
    elif kind in (str, Path):
        if item.tag == _STR or item.quoted:
            return kind(text)
        raise _wrong(item, name, "a text (put it in quotes)")
    else:
        raise TypeError(f"{name} has the type {kind}, which configurations do not know.")
    raise _wrong(item, name, _WORDS[kind])


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
}


def _guess(item: _Item) -> Any:
    """A value without a declared type, by YAML's own rules."""
    if isinstance(item.value, dict):
        return {name: _guess(child) for name, child in item.value.items()}
    if isinstance(item.value, list):
        return [_guess(child) for child in item.value]
    if item.quoted or item.tag == _STR:
        return item.value
    return None if item.tag == _NULL else yaml.safe_load(item.value)
