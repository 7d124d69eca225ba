"""Which decoder a conversation is bound to, from its first turn to its end."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


class StaleEpoch(ValueError):
    """A binding to an engine's earlier epoch: its KV is gone."""


@dataclass(frozen=True, slots=True)
class Binding:
    key: str
    engine: str
    epoch: int
    bound_at: float


class Bindings:
    """The table. In the directory it is the authority; in a gateway it is a cache of it.

    Entries are kept in order of last use, so that expiry looks only at what expires.
    """

    def __init__(self) -> None:
        self._bindings: OrderedDict[str, Binding] = OrderedDict()
        self._used_at: dict[str, float] = {}
        self._by_engine: dict[str, set[str]] = {}
        self._epochs: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._bindings)

    def __iter__(self) -> Iterator[Binding]:
        return iter(tuple(self._bindings.values()))

    def bind(self, key: str, engine: str, epoch: int, now: float) -> Binding:
        if epoch < self._epochs.get(engine, epoch):
            raise StaleEpoch(
                f"engine {engine} is in epoch {self._epochs[engine]}, not {epoch}; place {key} again"
            )
        self.end(key)
        self._void_before(engine, epoch)
        binding = Binding(key, engine, epoch, now)
        self._bindings[key] = binding
        self._used_at[key] = now
        self._by_engine.setdefault(engine, set()).add(key)
        return binding

    def look_up(self, key: str) -> Binding | None:
        return self._bindings.get(key)

    def touch(self, key: str, now: float) -> bool:
        """A turn began, went on or ended; False when the conversation is not bound."""
        if key not in self._bindings:
            return False
        self._bindings.move_to_end(key)
        self._used_at[key] = now
        return True

    def end(self, key: str) -> Binding | None:
        binding = self._bindings.pop(key, None)
        if binding is not None:
            del self._used_at[key]
            self._by_engine[binding.engine].discard(key)
        return binding

    def void_epoch(self, engine: str, epoch: int) -> tuple[Binding, ...]:
        """Epoch `epoch` of an engine is over, and with it every binding to it or to an earlier one."""
        return self._void_before(engine, epoch + 1)

    def expire(self, now: float, ttl: float) -> tuple[Binding, ...]:
        """End what was not used for `ttl` seconds."""
        ended: list[Binding] = []
        while self._bindings:
            key = next(iter(self._bindings))
            if now - self._used_at[key] < ttl:
                break
            binding = self.end(key)
            assert binding is not None
            ended.append(binding)
        return tuple(ended)

    def bound_to(self, engine: str) -> tuple[str, ...]:
        return tuple(sorted(self._by_engine.get(engine, ())))

    def _void_before(self, engine: str, epoch: int) -> tuple[Binding, ...]:
        if epoch <= self._epochs.get(engine, -1):
            return ()
        self._epochs[engine] = epoch
        voided = [self.end(key) for key in self.bound_to(engine)]
        return tuple(binding for binding in voided if binding is not None)
