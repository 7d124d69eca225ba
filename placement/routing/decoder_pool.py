"""KV in use on the decoders, and the choice of the decoder with the least KV in use.

KV in use is what an engine last reported as held for live conversations, plus the reservations for
conversations that it has not reported yet. Parked KV does not count, because it is on the host. Offline KV
does not count, because it is released as soon as online work needs the space. A check of whether a
conversation fits also leaves out evictable idle KV.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from placement.engine_table import OPTIONS, EngineTable
from placement.engines import EngineState
from placement.overload.signal import KvDemand
from placement.routing.receipts import DecoderChoice, DecoderOption, Why

CLOSED = -1.0


@dataclass(frozen=True, slots=True)
class KvFill:
    """KV in use on a set of engines, and the limit on it."""

    in_use: float  # tokens, not evictable
    limit: float  # tokens that these engines may hold, except engines that accept no conversations

    def __add__(self, other: "KvFill") -> "KvFill":
        return KvFill(self.in_use + other.in_use, self.limit + other.limit)

    @property
    def pressure(self) -> float:
        return self.in_use / self.limit if self.limit else float(self.in_use > 0)


class DecoderPool:
    """Engines that hold conversations, with their KV in use, their limits and their reservations.

    These are the columns of its table, in tokens of KV. `limit` is the KV that an engine may hold now.
    `open_limit` is the same, or `CLOSED` where no conversation may be placed. `whole_limit` is the limit of
    the engine with its whole model; while it shares its layers, its `limit` is higher. A conversation
    occupies `per_token` for each of its tokens, and `per_conversation` in addition.
    """

    def __init__(self) -> None:
        self._table = EngineTable(
            live=0.0,
            idle=0.0,
            offline=0.0,
            waiting=0.0,
            reserved=0.0,
            limit=0.0,
            open_limit=CLOSED,
            whole_limit=0.0,
            per_token=1.0,
            per_conversation=0.0,
        )
        self._reservations: dict[str, tuple[str, int]] = {}  # conversation -> decoder, tokens
        self._reserved_on: dict[str, set[str]] = {}  # decoder -> conversations

    def __len__(self) -> int:
        return len(self._reserved_on)

    def __contains__(self, engine: str) -> bool:
        return engine in self._reserved_on

    def add(self, engine: str, limit: int) -> None:
        self._table.add(engine, limit=limit, open_limit=limit, whole_limit=limit)
        self._reserved_on[engine] = set()

    def resize(self, engine: str, limit: int) -> None:
        """Set the KV limit of an engine that dropped or restored parameters."""
        row = self._table.row(engine)
        if self._table["open_limit"][row] != CLOSED:
            self._table["open_limit"][row] = limit
        self._table["limit"][row] = limit

    def remove(self, engine: str) -> tuple[str, ...]:
        """Remove an engine, and return the conversations that had a reservation there."""
        lost = tuple(sorted(self._reserved_on.pop(engine)))
        for key in lost:
            del self._reservations[key]
        self._table.remove(engine)
        return lost

    def observe(self, state: EngineState, last_seq: int) -> None:
        """Apply a report. `last_seq` is the number of the last applied report of this epoch, or 0."""
        engine, row = state.engine, self._table.row(state.engine)
        self._table["live"][row] = state.live_tokens
        self._table["idle"][row] = min(state.idle_tokens, state.live_tokens)
        self._table["offline"][row] = state.offline_tokens
        self._table["waiting"][row] = state.waiting_kv_tokens
        self._table["per_token"][row] = state.kv_per_token
        self._table["per_conversation"][row] = state.kv_per_conversation
        self._table["open_limit"][row] = CLOSED if state.draining else self._table["limit"][row]
        if 0 < last_seq < state.named_after:  # the report may lack confirmations, so assume them all
            for key in tuple(self._reserved_on[engine]):
                self.release(key)
        for key, named in state.confirmed.items():
            if named > last_seq and key in self._reserved_on[engine]:
                self.release(key)

    def choose(self, tokens: int, preferred: str | None) -> DecoderChoice | None:
        """Return the decoder for a conversation of `tokens`, or None if the conversation fits on no decoder.

        This is `preferred` if the conversation fits there, or else the decoder with the least KV in use.
        """
        table = self._table
        in_use = table["live"] + table["reserved"]
        fits = in_use - table["idle"] <= table["open_limit"] - self._kv_of(tokens)
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
        """Yield the decoders on which a conversation of `tokens` fits, in order of the KV in use."""
        in_use = self._table["live"] + self._table["reserved"]
        fits = in_use - self._table["idle"] <= self._table["open_limit"] - self._kv_of(tokens)
        rows = np.flatnonzero(fits)
        for row in rows[np.argsort(in_use[rows], kind="stable")]:
            yield self._table.name(int(row))

    def _kv_of(self, tokens: int, conversations: int = 1) -> NDArray[np.float64]:
        """Return, for every engine, the KV that `conversations` with `tokens` in total would occupy there."""
        return tokens * self._table["per_token"] + conversations * self._table["per_conversation"]

    def reserve(self, engine: str, key: str, tokens: int) -> None:
        self.release(key)
        row = self._table.row(engine)
        taken = int(self._kv_of(tokens)[row])
        self._reservations[key] = (engine, taken)
        self._reserved_on[engine].add(key)
        self._table["reserved"][row] += taken

    def release(self, key: str) -> None:
        """Drop a reservation, because the engine now reports the KV itself or the conversation ended."""
        engine, tokens = self._reservations.pop(key, ("", 0))
        if engine:
            self._reserved_on[engine].discard(key)
            self._table["reserved"][self._table.row(engine)] -= tokens

    def could_ever_hold(self, tokens: int) -> bool:
        return bool((self._table["whole_limit"] >= self._kv_of(tokens)).any())

    def option(self, engine: str) -> DecoderOption:
        row = self._table.row(engine)
        in_use = self._table["live"][row] + self._table["reserved"][row]
        return DecoderOption(engine, int(in_use), int(self._table["limit"][row]))

    def open_count(self) -> int:
        """Return how many engines accept conversations."""
        return int(np.count_nonzero(self._open_rows()))

    def fill(self, engines: Iterable[str] | None = None) -> KvFill:
        """Return the KV in use on `engines`, by default on all, and their limit.

        KV on draining engines counts as in use, because its conversations will need space elsewhere.
        """
        table = self._table
        rows = [table.row(engine) for engine in (self._reserved_on if engines is None else engines)]
        in_use = float((table["live"][rows] - table["idle"][rows] + table["reserved"][rows]).sum())
        open_rows = [row for row in rows if table["open_limit"][row] >= 0.0]
        return KvFill(in_use, float(table["limit"][open_rows].sum()))

    def demand(self, refused: Sequence[int]) -> KvDemand:
        """Return the KV of the open engines, and the KV that is demanded from them.

        The demand includes the KV that draining engines hold. A reservation counts as waiting, because its
        conversation waits or is in transfer. `refused` are the tokens of each conversation that fits on no
        engine; each counts the KV that it would take on the engine where it takes least.
        """
        table, rows = self._table, self._open_rows()
        leaving = [row for row in map(self._table.row, self._reserved_on) if not rows[row]]
        moves = (table["live"][leaving] - table["idle"][leaving]).sum()
        idle, waiting = table["idle"][rows], np.maximum(table["reserved"][rows], table["waiting"][rows])
        least = self._kv_of(sum(refused), len(refused))[rows]
        return KvDemand(
            capacity=float(table["whole_limit"][rows].sum()),
            held=float((table["live"][rows] - idle).sum() + moves),
            evictable=float((idle + table["offline"][rows]).sum()),
            waiting=float(waiting.sum()),
            refused=float(least.min()) if len(least) else 0.0,
        )

    def _open_rows(self) -> NDArray[np.bool_]:
        return self._table["open_limit"] >= 0.0
