"""Bindings of conversations to decoders, from the first turn to the end."""

from collections.abc import Iterator
from dataclasses import dataclass

from placement import PlacementError


class StaleEpoch(PlacementError, ValueError):
    """Error: the requested binding is to an earlier epoch of the engine, whose KV is gone."""


@dataclass(frozen=True, slots=True)
class Binding:
    key: str
    engine: str
    epoch: int
    bound_at: float


class Bindings:
    def __init__(self) -> None:
        self._bindings: dict[str, Binding] = {}
        self._by_engine: dict[str, set[str]] = {}
        self._epochs: dict[str, int] = {}  # engine -> newest epoch

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
        self.void_epoch(engine, epoch - 1)
        self._epochs[engine] = epoch
        binding = Binding(key, engine, epoch, now)
        self._bindings[key] = binding
        self._by_engine.setdefault(engine, set()).add(key)
        return binding

    def look_up(self, key: str) -> Binding | None:
        return self._bindings.get(key)

    def end(self, key: str) -> Binding | None:
        binding = self._bindings.pop(key, None)
        if binding is not None:
            self._by_engine[binding.engine].discard(key)
        return binding

    def void_epoch(self, engine: str, epoch: int) -> tuple[Binding, ...]:
        """End all bindings to an engine's epochs up to `epoch`, and return them.

        Conversations can be bound to the same epoch again, because an unreachable engine may return in it.
        """
        if epoch < self._epochs.get(engine, epoch):
            return ()
        self._epochs[engine] = epoch
        voided = [self.end(key) for key in self.bound_to(engine)]
        return tuple(binding for binding in voided if binding is not None)

    def bound_to(self, engine: str) -> tuple[str, ...]:
        return tuple(sorted(self._by_engine.get(engine, ())))
