"""API keys: what a key is, the file that they are in, and who calls by which.

A key's secret is nowhere but with its caller; the file and the gateways have its hash. What a caller leaves
in the fleet (conversations, files, batches) is its *owner's*, a name in the file: another key of the same
owner finds it again. The file is read again when it changes; one that is wrong changes nothing.
"""

import asyncio
import logging
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from router import metrics
from router.errors import Forbidden, GatewayConfigError, Unauthorized
from router.http import Headers
from router.identity.conversation_ids import namespace
from router.process import WatchedFiles, content_of
from router.requests.parser_pool import Readers

log = logging.getLogger("conserve.router.keys")

_REMEMBERED = 1024  # secrets whose hash is known
_MOST_BYTES = 8 << 20  # of a keys file
_MOST_DEEP = 8  # lists and mappings in each other; a key needs four
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # scalars stay text: each field says what it is


class Scope(StrEnum):
    SERVE = "serve"  # have work done, and see and end what is its owner's
    READ = "read"  # see what is its owner's, and the metrics
    ADMIN = "admin"  # see what is anybody's: all conversations, the dashboard, the metrics


def hash_of(secret: str) -> str:
    """Secrets are 256 random bits, so that nobody finds one by trying: a slow or salted hash, which passwords
    need, would cost every request and keep nothing that this does not."""
    return f"sha256:{sha256(secret.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _moment(given: object) -> object:
    """A day or a time as in ISO 8601, of UTC where it says no zone, as seconds."""
    if not isinstance(given, str):
        return given
    try:
        when = datetime.fromisoformat(given)
    except ValueError:
        raise ValueError("a day as in 2027-01-31, or a time as in 2027-01-31T12:00") from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


_Count = Annotated[int, Field(gt=0, le=10**12)]
_STRICT = ConfigDict(extra="forbid")


class StructuredOutputs(StrEnum):
    """Whether answers may be held to a grammar or schema, which an engine compiles."""

    ALLOW = "allow"
    REFUSE = "refuse"


@checked(frozen=True, config=_STRICT)
class Limits:
    """Limits of a key; None: as the fleet file says for all keys, or there without a bound."""

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None  # computed ones: of prompts what no cache held, and answers
    turns: _Count | None = None  # at once
    waiting_share: Annotated[float, Field(gt=0, le=1)] | None = None  # of places where its owner's turns wait
    stored_gib: Annotated[float, Field(ge=0, le=1 << 30)] | None = None  # of its owner's files
    batches: Annotated[int, Field(ge=0, le=10**12)] | None = None  # of its owner's that have not ended
    grammars_per_minute: _Count | None = None  # new ones, for engines to compile
    structured_outputs: StructuredOutputs | None = None

    def over(self, others: "Limits") -> "Limits":
        mine = {name: most for name, most in vars(self).items() if most is not None}
        return Limits(**{**vars(others), **mine})


COMMON = Limits(  # where a fleet file says nothing
    waiting_share=0.5,
    stored_gib=100.0,
    batches=100,
    grammars_per_minute=120,
    structured_outputs=StructuredOutputs.ALLOW,
)


@checked(frozen=True, config=_STRICT)
class Key:
    """One entry of the file, and whoever calls by it."""

    id: _Name
    owner: _Name
    hash: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]  # empty: of a fleet that asks for none
    scopes: frozenset[Scope] = frozenset({Scope.SERVE})
    models: tuple[str, ...] = ()  # none named: all
    expires: Annotated[float | None, BeforeValidator(_moment)] = None
    limits: Limits = Limits()

    @property
    def admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def check(self, method: str) -> None:
        """Refuses a method that none of its scopes allows."""
        allowed = self.scopes if method in ("GET", "HEAD") else self.scopes & {Scope.SERVE}
        if not allowed:
            raise Forbidden(f"this API key may not {method}: its scopes lack serve", code="scope_missing")

    def check_reads(self) -> None:
        if not self.scopes & {Scope.READ, Scope.ADMIN}:
            raise Forbidden("the metrics take an API key with the scope read or admin", code="scope_missing")


def inline(api_keys: Sequence[str], admin_keys: Sequence[str]) -> tuple[Key, ...]:
    """Keys that stand in the fleet file themselves; the owner of each is the beginning of its hash."""
    made = [_made(secret, hash_of(secret)) for secret in api_keys if secret not in admin_keys]
    return (*made, *(_made(secret, hash_of(secret), Scope.ADMIN) for secret in admin_keys))


def _made(secret: str, hashed: str, *more: Scope) -> Key:
    owner = namespace(secret)
    return Key(owner, owner, hashed, frozenset({Scope.SERVE, *more}))


class KeysFileError(GatewayConfigError):
    """A keys file that cannot be used; each line of it is FILE:LINE: what is wrong."""


def parse(text: str, name: str, others: Sequence[Key] = ()) -> tuple[Key, ...]:
    """`others`: keys beside the file's; an id of theirs is only that of the same key."""
    try:
        root = _built(text)
    except _Wrong as wrong:
        line, said = wrong.args
        raise KeysFileError(f"{name}:{line}: {said}") from None
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark else 1
        raise KeysFileError(f"{name}:{line}: not valid YAML: {wrong.problem}") from wrong
    except yaml.YAMLError as wrong:
        raise KeysFileError(f"{name}:1: not valid YAML: {wrong}") from wrong
    if root is None:  # perhaps one that is being written
        raise KeysFileError(f"{name}:1: there is nothing in it; write [] for no keys")
    if not isinstance(root, _List):
        raise KeysFileError(f"{name}:1: expected a list of keys, each with id, owner and hash")
    keys: list[Key] = []
    problems: list[tuple[Sequence[int | str], str]] = []
    for index, entry in enumerate(root):  # one by one, so that other threads have their turn
        try:
            keys.append(_ADAPTER.validate_python(entry))
        except ValidationError as wrong:
            problems += [((index, *one["loc"]), _said(one)) for one in wrong.errors()]
    problems = problems or list(_twice(keys, others))
    if problems:
        lines = dict.fromkeys(f"{name}:{_line_of(root, at)}: {said}" for at, said in problems)
        raise KeysFileError("\n".join(lines))
    return tuple(keys)


def load(file: Path, others: Sequence[Key] = ()) -> tuple[Key, ...]:
    return _parsed(_content(file), file, others)


def _content(file: Path) -> bytes:
    try:
        content = content_of(file, _MOST_BYTES)
    except OSError as wrong:
        raise KeysFileError(f"{file}:1: cannot be read: {wrong.strerror or wrong}") from wrong
    if len(content) > _MOST_BYTES:
        raise KeysFileError(f"{file}:1: is longer than {_MOST_BYTES >> 20} MiB")
    return content


def _parsed(content: bytes, file: Path, others: Sequence[Key]) -> tuple[Key, ...]:
    try:
        return parse(content.decode(), str(file), others)
    except UnicodeDecodeError as wrong:
        raise KeysFileError(f"{file}:1: cannot be read: {wrong}") from wrong


class _List(list[Any]):
    """Of the file, with the line where each item begins."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line, self.items_at = line, dict[int | str, tuple[int, Any]]()

    def put(self, value: Any, line: int) -> None:
        self.items_at[len(self)] = line, value
        self.append(value)


class _Mapping(dict[str, Any]):
    def __init__(self, line: int) -> None:
        super().__init__()
        self.line, self.items_at = line, dict[int | str, tuple[int, Any]]()
        self._name: str | None = None  # whose value comes next

    def put(self, value: Any, line: int) -> None:
        if self._name is not None:
            self[self._name], self.items_at[self._name] = value, (line, value)
            self._name = None
        elif not isinstance(value, str):
            raise _Wrong(line, "a name is a word, not a list or a mapping")
        elif value in self:
            raise _Wrong(line, f"'{value[:100]}' stands twice")
        else:
            self._name = value


class _Wrong(GatewayConfigError):
    """Line, what is wrong."""


def _built(text: str) -> Any:
    """Lists, mappings and text. From events, since libyaml's composer calls itself for each bracket, until
    the process ends, and keeps other threads from running."""
    root: Any = None
    within: list[_List | _Mapping] = []
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.CollectionEndEvent):
            within.pop()
        elif isinstance(event, yaml.AliasEvent):
            raise _Wrong(line, f"say it again instead of *{event.anchor}")
        elif isinstance(event, yaml.NodeEvent):
            value: Any = event.value if isinstance(event, yaml.ScalarEvent) else _of(event, line)
            if within:
                within[-1].put(value, line)
            elif root is None:
                root = value
            else:
                raise _Wrong(line, "a second document begins; a keys file is one")
            if isinstance(event, yaml.CollectionStartEvent):
                within.append(value)
                if len(within) > _MOST_DEEP:
                    raise _Wrong(line, f"more than {_MOST_DEEP} lists and mappings in each other")
    return root


def _of(event: yaml.NodeEvent, line: int) -> _List | _Mapping:
    return _List(line) if isinstance(event, yaml.SequenceStartEvent) else _Mapping(line)


def _line_of(root: Any, path: Sequence[int | str]) -> int:
    """Of the innermost thing on this path that the text has."""
    line: int = root.line
    for part in path:
        line, root = getattr(root, "items_at", {}).get(part, (line, None))
    return line


def _said(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        kind = Limits if path.startswith("limits.") else Key
        return f"unknown field '{path}'; it is one of {', '.join(sorted(kind.__dataclass_fields__))}"
    if error["type"] in ("missing", "missing_argument"):
        return f"'{path}' is missing"
    if error["type"] in ("tuple_type", "dataclass_type", "dataclass_exact_type") and not path:
        return "expected a list of keys, each with id, owner and hash"
    return f"{path}: {str(error['msg']).removeprefix('Value error, ')}"


def _twice(keys: Sequence[Key], others: Sequence[Key]) -> Iterator[tuple[Sequence[int | str], str]]:
    for field in ("id", "hash"):
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            value = getattr(key, field)
            if not value:
                yield (index, field), f"{field}: is empty"
            elif first.setdefault(value, index) != index:
                yield (index, field), f"{field}: is that of the key {keys[first[value]].id} too"
    hashes = {key.id: key.hash for key in others}
    for index, key in enumerate(keys):
        if hashes.get(key.id, key.hash) != key.hash:
            yield (index, "id"), "id: is that of another key, which the fleet file has"


_ADAPTER = TypeAdapter(Key)


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """Many keys in few parcels, opened when one of theirs is used: taking 20,000 keys over holds a gateway's
    loop some 10 ms."""

    count: int
    by_hash: Mapping[str, bytes]
    hashes: Mapping[str, bytes]  # by id

    @classmethod
    def of(cls, keys: Iterable[Key], limits: Limits) -> "PackedKeys":
        whole = {key.hash: replace(key, limits=key.limits.over(limits)) for key in keys}
        packed = {hashed: pickle.dumps(key) for hashed, key in whole.items()}
        return cls(len(whole), _parcels(packed), _parcels({key.id: key.hash for key in whole.values()}))

    def of_hash(self, hashed: str) -> Key | None:
        packed = _within(self.by_hash, hashed)
        return pickle.loads(packed) if packed is not None else None

    def of_id(self, id: str) -> Key | None:
        hashed = _within(self.hashes, id)
        return self.of_hash(hashed) if hashed is not None else None


def _parcels(values: Mapping[str, Any]) -> dict[str, bytes]:
    parcels: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        parcels[_parcel(name)][name] = value
    return {parcel: pickle.dumps(inside) for parcel, inside in parcels.items()}


def _within(parcels: Mapping[str, bytes], name: str) -> Any:
    parcel = parcels.get(_parcel(name))
    return pickle.loads(parcel).get(name) if parcel is not None else None


def _parcel(name: str) -> str:
    return hash_of(name)[-2:]


@dataclass(frozen=True, slots=True)
class KeysReading:
    """What is asked of the reader of a keys file."""

    file: Path
    given: Sequence[Key]
    limits: Limits
    space: str = "\0keys"  # of no owner

    def read(self, pieces: Sequence[bytes]) -> PackedKeys | str:
        """Of a key that stands in both, what the keys file says. Text: what is wrong with the file."""
        try:
            keys = _parsed(b"".join(pieces), self.file, self.given)
        except KeysFileError as wrong:
            return str(wrong)
        return PackedKeys.of((*self.given, *keys), self.limits)


class Keys:
    """The keys of a fleet, as a gateway knows them now. Where only admins have any, everybody is let in."""

    def __init__(
        self,
        given: Sequence[Key],
        file: str | None,
        limits: Limits = COMMON,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`given`: those that stand in the fleet file; `limits`: where a key has none of its own."""
        self._limits = limits
        self.any = bool(given) or file is not None
        self.open = file is None and all(key.admin for key in given)
        self._given = given
        self._file = Path(file).expanduser() if file is not None else None
        self._clock = clock
        self._use(PackedKeys.of(given, limits))
        if self._file is not None:
            self._watched = WatchedFiles(self._file)
            self._take(self._read(self._file))

    def __len__(self) -> int:
        return self._keys.count

    def caller(self, headers: Headers) -> Key:
        scheme, _, given = (headers.text(b"authorization") or "").partition(" ")
        bearer = scheme.lower() == "bearer"
        return self.of_secret(given.strip() if bearer else headers.text(b"x-api-key") or "")

    def of_secret(self, secret: str) -> Key:
        """Costs a look-up by the secret, or for one that did not come lately its hash and a look-up by that:
        how long either takes says nothing of what a hash begins with."""
        key = self._of_secret(secret)
        if key.expires is not None and key.expires <= self._clock():
            raise Unauthorized("the API key has expired; ask for another", code="api_key_expired")
        return key

    def _known(self, secret: str) -> Key:
        key = self._of_hash(hash_of(secret))
        if key is None and self.open:
            made = _made(secret, "")
            return replace(made, limits=made.limits.over(self._limits))
        if key is None:
            raise Unauthorized(
                "the API key is missing or not known; send it as `Authorization: Bearer KEY`"
                if not secret
                else "the API key is not known to this fleet"
            )
        return key

    def limits_of(self, id: str) -> Limits | None:
        """Of the key of this id, or where any may come, of whoever does."""
        key = self._of_id(id)
        return key.limits if key is not None else self._limits if self.open else None

    async def watch(self) -> None:
        """Until cancelled: read the file again when it has become another one. In another process: parsing
        thousands of keys would hold the loop. That process reads nothing else, so that no caller's bodies
        keep a revoked key valid."""
        readers = Readers(processes=1)
        try:
            while self._file is not None:
                await self._watched.due()
                self._take(await self._read_beside(self._file, readers))
                readers.close()
        finally:
            readers.close()

    def _asked(self, file: Path) -> KeysReading:
        return KeysReading(file, self._given, self._limits)

    def _read(self, file: Path) -> PackedKeys | str:
        try:
            self._watched.begin()
            read = self._asked(file).read((_content(file),))
        except Exception as wrong:  # noqa: BLE001 - whatever it is: it may pass
            return self._not_read(file, wrong)
        self._watched.ended(again=False)
        return read

    async def _read_beside(self, file: Path, readers: Readers) -> PackedKeys | str:
        try:
            await asyncio.to_thread(self._watched.begin)
            content = await asyncio.to_thread(_content, file)
            read = await readers.read_beside(self._asked(file), (content,))
        except Exception as wrong:  # noqa: BLE001 - as above
            return self._not_read(file, wrong)
        self._watched.ended(again=False)
        return read

    def _not_read(self, file: Path, wrong: Exception) -> str:
        """Nothing is known of what it says."""
        self._watched.ended(again=True)
        return str(wrong) if isinstance(wrong, KeysFileError) else f"{file}:1: cannot be read: {wrong!r}"

    def _take(self, read: PackedKeys | str) -> None:
        metrics.KEYS_STALE.set(isinstance(read, str))
        if isinstance(read, str):
            log.error("keys not read, those known before stay in use keys=%d\n%s", len(self), read)
            return
        self._use(read)
        log.info("keys read file=%s keys=%d", self._file, read.count - len(self._given))

    def _use(self, keys: PackedKeys) -> None:
        self._keys = keys
        self._of_hash = lru_cache(_REMEMBERED)(keys.of_hash)
        self._of_id = lru_cache(_REMEMBERED)(keys.of_id)
        self._of_secret = lru_cache(_REMEMBERED)(self._known)
