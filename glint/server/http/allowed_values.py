"""The values that a field of a body may have, for the refusal of another one."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache

from msgspec import inspect

_STEP = re.compile(r"\.([^.\[]+)|\[")


def allowed_values(kind: type, path: str) -> str:
    """The values of the place at a path of msgspec, such as `.tools[0].type`, as text; empty where it has no list."""
    return _values_at(kind, tuple(_STEP.findall(path)))


@lru_cache(maxsize=256)
def _values_at(kind: type, names: tuple[str, ...]) -> str:
    places = list(_alternatives(inspect.type_info(kind)))
    for name in names:
        places = [inner for place in places for inner in _inside(place, name)]
    values = [value for place in places if isinstance(place, inspect.LiteralType) for value in place.values]
    return ", ".join(dict.fromkeys(f"'{value}'" if isinstance(value, str) else json.dumps(value) for value in values))


def _alternatives(place: inspect.Type) -> Iterator[inspect.Type]:
    """The types that a place may have."""
    if isinstance(place, inspect.UnionType):
        for one in place.types:
            yield from _alternatives(one)
    else:
        yield place


def _inside(place: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The types of a field by its name, or of the items of a list where the name is empty."""
    if isinstance(place, inspect.StructType) and name:
        if name == place.tag_field and isinstance(place.tag, str):
            yield inspect.LiteralType((place.tag,))
        for field in place.fields:
            if field.encode_name == name:
                yield from _alternatives(field.type)
    elif isinstance(place, inspect.ListType) and not name:
        yield from _alternatives(place.item_type)
