"""Tables of the vLLM names that we rely on, and the check that an engine's vLLM matches them."""

import dis
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import CodeType
from typing import Any

import vllm

from kvtransfer import KVTransferError

WRITTEN_FOR = "0.32"
PINNED = "0.32.0"


class UnsupportedVllmError(KVTransferError, RuntimeError):
    """The installed vLLM differs from the pinned one; the message says where and what to install."""


Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ReliedOn:
    """Names of vLLM that one feature relies on, in mappings whose keys are classes (`module:Class`)."""

    signatures: Mapping[str, Names]  # parameters by method
    attributes: Names  # fields, properties, or what `__init__` sets
    uses: Mapping[str, Names] = field(default_factory=dict)  # names that a method's code refers to


def verify(relied: ReliedOn, release: str = vllm.__version__) -> None:
    """Raise UnsupportedVllmError if this vLLM differs from the table or is another release."""
    if not release.startswith(WRITTEN_FOR + "."):
        raise UnsupportedVllmError(
            f"this engine's connector was written for vLLM {WRITTEN_FOR} and this is {release}: "
            f"install vllm=={PINNED}"
        )
    for difference in differences(relied):
        raise UnsupportedVllmError(f"{difference} in this vLLM ({release}): install vllm=={PINNED}")


def differences(relied: ReliedOn) -> Iterator[str]:
    """Yield a sentence for each name of the table that is missing or different."""
    for path, methods in relied.signatures.items():
        for name, wanted in methods.items():
            method = getattr(_owner(path), name, None)
            found = tuple(inspect.signature(method).parameters) if callable(method) else None
            if found != wanted:
                actual = f"has the parameters ({', '.join(found)})" if found is not None else "does not exist"
                yield f"{_short(path)}.{name}({', '.join(wanted)}) is relied on, but {actual}"
    for path, names in relied.attributes.items():
        owner = _owner(path)
        for name in names:
            if not _has_attribute(owner, name):
                yield f"{_short(path)}.{name} is relied on, but does not exist"
    for path, methods in relied.uses.items():
        for name, used in methods.items():
            for missing in sorted(set(used) - _names(getattr(_owner(path), name, None))):
                yield f"{_short(path)}.{name} is relied on to use {missing}, but does not"


def _owner(path: str) -> Any:
    """Return the class or module that `path` names (`module:Class` or `module`), or None if it is missing."""
    module, _, name = path.partition(":")
    try:
        found = import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError):
        return None


def _short(path: str) -> str:
    return path.rpartition(":")[2].rpartition(".")[2]


def _has_attribute(owner: Any, name: str) -> bool:
    return hasattr(owner, name) or any(
        name in getattr(one, "__annotations__", {}) or name in _stored(one.__dict__.get("__init__"))
        for one in getattr(owner, "__mro__", ())
    )


def _code(function: Any) -> CodeType | None:
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


@cache  # schedulers of one process verify the same long functions
def _stored(function: Any) -> frozenset[str]:
    """Return the names of the attributes that a function sets."""
    instructions = dis.get_instructions(code) if (code := _code(function)) is not None else ()
    return frozenset(str(one.argval) for one in instructions if one.opname == "STORE_ATTR")


def _names(function: Any) -> set[str]:
    """Return every name to which the code of a function and of its nested functions refers."""
    code = _code(function)
    return _names_in(code) if code is not None else set()


def _names_in(code: CodeType) -> set[str]:
    within = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*within)
