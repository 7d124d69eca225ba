"""What a replay is doing, live in a terminal."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from traces.format import Conversation
from traces.replay.results import ConversationResult, Outcome, TurnResult

WINDOW_S = 10.0  # of the live rate


class Live:
    """A progress bar: conversations done, in flight, failed, and the rate of the last seconds."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._live = self._failed = 0
        self._recent: list[tuple[float, int]] = []

    def __enter__(self) -> "Live":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str, conversations: int) -> None:
        self._live = self._failed = 0
        self._task = self._progress.add_task(name, total=conversations, state="")

    def started(self, conversation: Conversation) -> None:
        self._live += 1
        self._show(0)

    def answered(self, turn: TurnResult) -> None:
        self._recent.append((time.monotonic(), turn.output_tokens))
        self._show(0)

    def ended(self, result: ConversationResult) -> None:
        self._live = max(0, self._live - 1)
        self._failed += result.outcome is Outcome.FAILED
        self._show(1)

    def _show(self, advance: int) -> None:
        if self._task is None:
            return
        now = time.monotonic()
        self._recent = [(at, tokens) for at, tokens in self._recent if now - at <= WINDOW_S]
        rate = sum(tokens for _, tokens in self._recent) / WINDOW_S
        failed = f", {self._failed} failed" if self._failed else ""
        state = f"{self._live} in flight{failed}, {rate:,.0f} tok/s"
        self._progress.update(self._task, advance=advance, state=state)
