"""The families sejax knows: add one by its file and one name here."""

from . import llama, qwen2, qwen3
from .family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def by(key: str, value: str, where: str) -> Family:
    """The family whose field `key` ("name", "architecture" or "gguf") is `value`; ValueError names file and choices."""
    for family in FAMILIES:
        if getattr(family, key) == value:
            return family
    known = ", ".join(getattr(f, key) for f in FAMILIES)
    raise ValueError(f"{where}: architecture {value!r} is not supported; supported are {known}")
