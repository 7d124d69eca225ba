"""The decoder with the least KV in use, among those where the conversation fits.

KV in use is what the engine last reported as held for live conversations, plus what has been reserved for
conversations that it has not reported yet. Parked and offline KV do not count: the first is on the host, the
second is released at once when online work needs the place. For what fits, KV between turns that is on the
host as well does not count either: it gives way at no cost when a running turn needs its place.
"""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from placement.engines import EngineState
from placement.overload.signal import KvDemand
from placement.routing.engine_table import OPTIONS, EngineTable
from placement.routing.receipts import DecoderChoice, DecoderOption, Why

CLOSED = -1.0


class Decoders:
    def __init__(self) -> None:
        # `limit` is the KV an engine may hold. `open_limit` is the same, or below zero where nothing may be
        # placed, which takes the row out of a choice.
        # `whole` is the limit with a whole model: what it may hold while its parameters give way is more.
        # A conversation takes `per_token` of it for each of its tokens, and `beside` at any length.
        self._table = EngineTable(
            live=0.0,
            idle=0.0,
            offline=0.0,
            waiting=0.0,
            reserved=0.0,
            limit=0.0,
            open_limit=CLOSED,
            whole=0.0,
            per_token=1.0,
            beside=0.0,
        )
        self._reservations: dict[str, tuple[str, int]] = {}  # conversation -> decoder, tokens
        self._holders: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, engine: str) -> bool:
        return engine in self._holders

    def add(self, engine: str, limit: int) -> None:
        self._table.add(engine, limit=limit, open_limit=limit, whole=limit)
        self._holders[engine] = set()

    def resize(self, engine: str, limit: int) -> None:
        """Parameters gave way to KV there, or came back."""
        row = self._table.row(engine)
        if self._table["open_limit"][row] != CLOSED:
            self._table["open_limit"][row] = limit
        self._table["limit"][row] = limit

    def remove(self, engine: str) -> tuple[str, ...]:
        """Forget an engine; returns the conversations that had a reservation there."""
        lost = tuple(sorted(self._holders.pop(engine)))
        for key in lost:
            del self._reservations[key]
        self._table.remove(engine)
        return lost

    def observe(self, state: EngineState, before: int) -> None:
        """`before`: the report of this epoch that was taken in before this one; 0: none."""
        engine, row = state.engine, self._table.row(state.engine)
        self._table["live"][row] = state.live_tokens
        self._table["idle"][row] = min(state.idle_tokens, state.live_tokens)
        self._table["offline"][row] = state.offline_tokens
        self._table["waiting"][row] = state.waiting_kv_tokens
        self._table["per_token"][row] = state.kv_per_token
        self._table["beside"][row] = state.kv_per_conversation
        self._table["open_limit"][row] = CLOSED if state.draining else self._table["limit"][row]
        if 0 < before < state.named_after:  # what was confirmed meanwhile is not named any more
            for key in tuple(self._holders[engine]):
                self.release(key)
        for key, named in state.confirmed.items():
            if named > before and key in self._holders[engine]:
                self.release(key)

    def choose(self, tokens: int, preferred: str | None) -> DecoderChoice | None:
        """The decoder for a conversation that needs `tokens`; None where it fits on none."""
        table = self._table
        in_use = table["live"] + table["reserved"]
        fits = in_use - table["idle"] <= table["open_limit"] - self._takes(tokens)
        ranked = np.where(fits, in_use, inf)
        limits = table["limit"]
        why = Why.LEAST_KV_IN_USE
        if preferred is not None and preferred in self and fits[table.row(preferred)]:
            why = Why.PREFERRED
            ranked[table.row(preferred)] = -1.0
        options = [
            DecoderOption(table.name(row), int(in_use.item(row)), int(limits.item(row)))
            for row in table.least(ranked, OPTIONS)
        ]
        if not options:
            return None
        without_capacity = len(self) - int(np.count_nonzero(fits))
        return DecoderChoice(why, options[0], tuple(options[1:]), len(self), without_capacity)

    def fitting(self, tokens: int) -> Iterator[str]:
        """All on which a conversation fits that needs so many, the least KV in use first."""
        in_use = self._table["live"] + self._table["reserved"]
        fits = in_use - self._table["idle"] <= self._table["open_limit"] - self._takes(tokens)
        rows = np.flatnonzero(fits)
        for row in rows[np.argsort(in_use[rows], kind="stable")]:
            yield self._table.name(int(row))

    def _takes(self, tokens: int, conversations: int = 1) -> NDArray[np.float64]:
        return tokens * self._table["per_token"] + conversations * self._table["beside"]

    def reserve(self, engine: str, key: str, tokens: int) -> None:
        self.release(key)
        row = self._table.row(engine)
        taken = int(self._takes(tokens)[row])
        self._reservations[key] = (engine, taken)
        self._holders[engine].add(key)
        self._table["reserved"][row] += taken

    def release(self, key: str) -> None:
        """Drop a reservation: the engine reports the KV itself now, or the conversation ended."""
        engine, tokens = self._reservations.pop(key, ("", 0))
        if engine:
            self._holders[engine].discard(key)
            self._table["reserved"][self._table.row(engine)] -= tokens

    def could_ever_hold(self, tokens: int) -> bool:
        return bool((self._table["whole"] >= self._takes(tokens)).any())

    def option(self, engine: str) -> DecoderOption:
        row = self._table.row(engine)
        in_use = self._table["live"][row] + self._table["reserved"][row]
        return DecoderOption(engine, int(in_use), int(self._table["limit"][row]))

    def open(self) -> int:
        """How many take conversations."""
        return int(np.count_nonzero(self._open()))

    def pressure(self) -> float:
        """Share of what the pool may hold that is in use and cannot give way. What is on draining decoders
        will need a place too.
        """
        table, rows = self._table, [self._table.row(engine) for engine in self._holders]
        limit = self.limit()
        in_use = float((table["live"][rows] - table["idle"][rows] + table["reserved"][rows]).sum())
        return in_use / limit if limit else float(in_use > 0)

    def demand(self, refused: Sequence[int]) -> KvDemand:
        """Of those that take conversations, in tokens of their blocks; what is on draining ones needs a place
        there. What is placed and not yet visible waits or is on its way. `refused`: tokens of conversations
        that fit on none, counted as where they take the least."""
        table, rows = self._table, self._open()
        leaving = [row for row in map(self._table.row, self._holders) if not rows[row]]
        moves = (table["live"][leaving] - table["idle"][leaving]).sum()
        idle, waiting = table["idle"][rows], np.maximum(table["reserved"][rows], table["waiting"][rows])
        least = self._takes(sum(refused), len(refused))[rows]
        return KvDemand(
            capacity=float(table["whole"][rows].sum()),
            held=float((table["live"][rows] - idle).sum() + moves),
            yields=float((idle + table["offline"][rows]).sum()),
            waiting=float(waiting.sum()),
            refused=float(least.min()) if len(least) else 0.0,
        )

    def limit(self) -> float:
        """Tokens that the decoders may hold which take conversations."""
        return float(self._table["limit"][self._open()].sum())

    def _open(self) -> NDArray[np.bool_]:
        return self._table["open_limit"] >= 0.0
