"""An iteration between its scheduling and its result, and what is counted of it (metrics.py)."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from placement.serving.state import RunningBatch
from workers.coserving.rollback import ScheduledRow


@dataclass(slots=True)
class Step:
    started: float
    batch: RunningBatch
    epoch: int  # 0: it cannot be aborted
    ledger: tuple[ScheduledRow, ...]
    offline_tokens: int
    preempted: int
    budget_tokens: int = 0  # offline tokens that there was room for
    again_tokens: int = 0  # offline tokens computed before, and lost to a preemption
    aborted: bool = False
    disowned: int = 0

    @property
    def rows(self) -> str:
        if not self.batch.online_rows:
            return "offline"
        return "mixed" if self.batch.offline_rows else "online"


def count(step: Step, counts: MutableMapping[str, Any], seconds: float, late: int) -> None:
    counts[f"coserving_iterations.{step.rows}"] += 1
    counts["coserving_preemptions"] += step.preempted
    counts["coserving_late_tokens"] += late
    counts["coserving_disowned_blocks"] += step.disowned
    counts["coserving_budget_tokens"] += step.budget_tokens
    counts["coserving_offline_tokens_lost.preemption"] += step.again_tokens
    if step.aborted:
        counts["coserving_aborts"] += 1
        counts["coserving_aborted_seconds"] += seconds
        counts["coserving_offline_tokens_lost.abort"] += step.offline_tokens
        return
    counts[f"coserving_seconds.{step.rows}"] += seconds
    counts[f"coserving_predicted_seconds.{step.rows}"] += step.batch.seconds
    counts["coserving_offline_tokens"] += step.offline_tokens
    counts["coserving_online_tokens"] += step.batch.work.new_tokens - step.offline_tokens


def observe(
    step: Step, observations: MutableMapping[str, list[float]], seconds: float, abort_wait_s: float
) -> None:
    if step.aborted:
        observations["coserving_abort_wait"].append(abort_wait_s)
    else:
        observations["coserving_model_error"].append(abs(step.batch.seconds - seconds) / seconds)
