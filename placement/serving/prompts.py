"""Prompts that wait for each other's iterations."""

from collections.abc import Sequence
from dataclasses import dataclass

from placement.latency import BatchWork, LatencyModel
from placement.serving.state import Row


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """What prompts take that are computed one after the other, beside rows that decode."""

    rows: BatchWork  # that decode, in every iteration
    max_tokens: int
    model: LatencyModel

    def better_wait(
        self, behind: Sequence[Row], tokens: int, ending: Sequence[Row], work: BatchWork, now: float
    ) -> bool:
        """Whether those behind are better left out of the iteration in which others get their first token.

        The rest of a prompt is often small, and filled up with `tokens` of the next one its iteration takes
        as long as any; left alone it costs those behind one iteration's constant and rows more. So they wait
        where the others would be late else, and if whoever is then the latest of all is less late.
        """
        alone = now + self.model.seconds(work)
        filled = now + self.model.seconds(work.plus(tokens, behind[0].computed))
        due = min(row.deadline() for row in ending)
        if filled <= due:
            return False
        late_alone = max(alone - due, self.lateness(behind, 0, alone))
        return late_alone < max(filled - due, self.lateness(behind, tokens, filled))

    def lateness(self, prompts: Sequence[Row], done: int, start: float) -> float:
        """Of the latest, beginning at `start`, the first with `done` tokens more than its row says."""
        at, latest = start, float("-inf")
        for row in prompts:
            left = row.pending - done
            iterations = -(-left // self.max_tokens)
            prompt = BatchWork().plus(left, row.computed + done)
            at += self.model.seconds(prompt) - self.model.seconds(BatchWork())
            at += iterations * self.model.seconds(self.rows)
            latest, done = max(latest, at - row.deadline()), 0
        return latest
