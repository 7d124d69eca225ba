"""Tokens of online rows in an iteration: rows that decode, and prompts that wait for their first token."""

import math
from collections.abc import Mapping

from placement.latency import BatchWork, LatencyModel
from placement.serving import memory
from placement.serving.policy import ServingSettings
from placement.serving.prompts import PromptQueue
from placement.serving.state import Row

LEAST_STRETCH = 0.25

Caps = Mapping[str, int]  # tokens of online rows at most, by key; of those not in it: all they want


def due(row: Row, margin: float) -> float:
    """When an iteration that has its next token should end."""
    return row.deadline() - margin * row.slo.tbt_s


def urgent_at(row: Row, settings: ServingSettings) -> float:
    """When a prompt has used up what others may cost it of its TTFT."""
    return row.arrival + settings.ttft_share * row.slo.ttft_s


def share_out(
    online: tuple[Row, ...], now: float, max_tokens: int, model: LatencyModel, settings: ServingSettings
) -> tuple[BatchWork, Caps]:
    """What online rows compute in this iteration.

    Rows that decode have their token, and prompts as much of the iteration as the soonest deadline leaves:
    also right after an abort, which has cost that deadline time already.
    """
    decoding = [row for row in online if row.decoding]
    prompts = [row for row in online if not row.decoding]
    rows = work = memory.online_work(decoding, max_tokens)
    target = math.inf
    if decoding:
        soonest = min(due(row, settings.margin) for row in decoding) - now
        target = max(soonest, 2 * model.seconds(rows))  # half is the prompts', or they would never end
    caps: dict[str, int] = {}
    ending: list[Row] = []
    for index, row in enumerate(prompts):
        want = min(row.pending, max_tokens - work.new_tokens)
        tokens = want if target == math.inf else model.max_tokens(work, row.computed, want, target)
        if tokens and ending:
            queue = PromptQueue(rows, max_tokens, model)
            if queue.better_wait(prompts[index:], tokens, ending, work, now):
                caps.update((other.key, 0) for other in prompts[index:])
                break
        if tokens < want:  # by time; the engine knows better how far its budget goes with prefix hits
            caps[row.key] = tokens
        if tokens:
            work = work.plus(tokens, row.computed)
            if tokens == row.pending:
                ending.append(row)
    return work, caps


def tightest_target(
    online: tuple[Row, ...], now: float, model: LatencyModel, settings: ServingSettings
) -> float | None:
    """How long an iteration may become by offline work: until a token is due, or a prompt urgent.

    A prompt's last chunk is small, and would otherwise be filled up with offline work while others wait
    behind it.
    """
    if not online:
        return None
    margin = settings.margin
    targets = [
        due(row, margin) - now if row.decoding
        else min(row.slo.tbt_s, urgent_at(row, settings) - now) * (1 - margin)
        for row in online
    ]  # fmt: skip
    decoding = [row for row in online if row.decoding]
    if decoding:
        targets.append(worth_stretching(decoding, model, settings.rows_per_constant))
    return max(min(targets), 0.0)


def worth_stretching(decoding: list[Row], model: LatencyModel, rows_per_constant: float) -> float:
    """How long rows that decode are best kept in an iteration, where their promise would allow more.

    Long iterations pay the constant less often; but the longer a token takes, the more online requests decode
    at once, and the prompts that come meanwhile are computed beside all of them. So when these rows cost more
    than some times the constant, offline work has that much less of what the promise leaves. It keeps a
    quarter, or it would starve beside long conversations, or by a profile in which the constant is nothing.
    """
    work = BatchWork.of((1, row.computed) for row in decoding)
    alone, constant = model.seconds(work), model.seconds(BatchWork())
    rows, worth = alone - constant, rows_per_constant * constant
    left = max(min(row.slo.tbt_s for row in decoding) - alone, 0.0)
    return alone + left * (max(worth / rows, LEAST_STRETCH) if rows > worth else 1.0)
