"""A report in a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from traces.replay.results import Replay
from traces.report.tables import Table, tables


def terminal(runs: Sequence[Replay]) -> RenderableType:
    return Group(*(part for table in tables(runs) for part in _parts(table)))


def _parts(table: Table) -> list[RenderableType]:
    drawn = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="right" if index else "left")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    parts: list[RenderableType] = [drawn]
    if table.note:
        parts.append(Text(table.note, style="dim"))
    parts.append(Text(""))
    return parts
