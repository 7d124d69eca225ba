"""Table of engines in numpy columns, so that a choice among a thousand takes a few array operations."""

import re
from bisect import bisect_left
from math import inf

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
OPTIONS = 4  # engines that a receipt names: the chosen engine and the next three


class EngineTable:
    """Table with a row per engine and named numeric columns.

    Rows are in the order of the engines' names, so that a tie goes to the first name. This explains a tie to
    the reader of a receipt, and makes the choice independent of the order in which engines were added. Spare
    rows at the end hold each column's filler, which must be a value that no choice picks.
    """

    def __init__(self, **fillers: float) -> None:
        self._fillers = fillers
        self._columns: dict[str, Column] = {name: np.full(8, filler) for name, filler in fillers.items()}
        self._names: list[str] = []
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, engine: str) -> bool:
        return engine in self._rows

    def __getitem__(self, column: str) -> Column:
        return self._columns[column]

    def row(self, engine: str) -> int:
        return self._rows[engine]

    def name(self, row: int) -> str:
        return self._names[row]

    def add(self, engine: str, **values: float) -> int:
        row, used = bisect_left(self._names, _in_order(engine), key=_in_order), len(self._names)
        for column, filler in self._fillers.items():
            cells = self._columns[column]
            if used == len(cells):
                cells = self._columns[column] = np.concatenate([cells, np.full(used, filler)])
            cells[row + 1 : used + 1] = cells[row:used]
            cells[row] = values.get(column, filler)
        self._names.insert(row, engine)
        self._number_from(row)
        return row

    def remove(self, engine: str) -> None:
        row, used = self._rows.pop(engine), len(self._names)
        for column, filler in self._fillers.items():
            cells = self._columns[column]
            cells[row : used - 1] = cells[row + 1 : used]
            cells[used - 1] = filler
        del self._names[row]
        self._number_from(row)

    def least(self, values: Column, count: int) -> list[int]:
        """Return the rows of the `count` smallest finite values in order; set these values to infinity."""
        rows: list[int] = []
        while len(rows) < count:
            row = int(values.argmin())
            if values.item(row) == inf:
                break
            values[row] = inf
            rows.append(row)
        return rows

    def _number_from(self, row: int) -> None:
        for later in range(row, len(self._names)):
            self._rows[self._names[later]] = later


def _in_order(engine: str) -> list[tuple[int, str]]:
    """Return a sorting key that puts decode-2 before decode-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", engine)]
