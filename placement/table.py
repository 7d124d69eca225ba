"""Engines as rows of numpy columns, so that a choice among a thousand of them is a few array operations."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]


class EngineTable:
    """Rows are taken lowest first, so that equal histories give equal ties.

    A row without an engine holds each column's filler, which must be a value that no choice picks.
    """

    def __init__(self, **fillers: float) -> None:
        self._fillers = fillers
        self._columns: dict[str, Column] = {name: np.empty(0) for name in fillers}
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._unused: list[int] = []
        self._grow(8)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, engine: str) -> bool:
        return engine in self._rows

    def __getitem__(self, column: str) -> Column:
        return self._columns[column]

    def row(self, engine: str) -> int:
        return self._rows[engine]

    def name(self, row: int) -> str:
        return self._names[row]

    def engines(self) -> tuple[str, ...]:
        return tuple(self._rows)

    def add(self, engine: str, **values: float) -> int:
        if not self._unused:
            self._grow(len(self._names))
        row = heappop(self._unused)
        self._rows[engine] = row
        self._names[row] = engine
        for column, value in values.items():
            self._columns[column][row] = value
        return row

    def remove(self, engine: str) -> None:
        row = self._rows.pop(engine)
        self._names[row] = ""
        for column, filler in self._fillers.items():
            self._columns[column][row] = filler
        heappush(self._unused, row)

    def _grow(self, more: int) -> None:
        old = len(self._names)
        self._names += [""] * more
        for column, filler in self._fillers.items():
            self._columns[column] = np.concatenate([self._columns[column], np.full(more, filler)])
        for row in range(old, old + more):
            heappush(self._unused, row)
