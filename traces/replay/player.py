"""One conversation, as its agent would have it: ask, wait for the answer, run the tool, append, go on."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import pairwise

from traces.errors import ReplayError
from traces.format import Conversation, Turn
from traces.replay.client import Answer, ChatClient, Clock, Message, Refused
from traces.replay.dialogue import Dialogue
from traces.replay.results import ConversationResult, Outcome, TurnResult

log = logging.getLogger("conserve.traces.replay")

Sleep = Callable[[float], Awaitable[None]]


class Player:
    """Keeps what was measured where a time limit can still find it after it ended the playing."""

    def __init__(
        self,
        conversation: Conversation,
        dialogue: Dialogue,
        client: ChatClient,
        clock: Clock,
        epoch: float,
        retries: int,
        on_turn: Callable[[TurnResult], None] = lambda turn: None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._conversation = conversation
        self._dialogue = dialogue
        self._client = client
        self._clock = clock
        self._epoch = epoch
        self._retries = retries
        self._on_turn = on_turn
        self._sleep = sleep
        self._started_s = 0.0
        self._turns: list[TurnResult] = []
        self._refusals = 0

    async def play(self) -> ConversationResult:
        self._started_s = self._now()
        try:
            for index, turn in enumerate(self._conversation.turns):
                if index:
                    await self._sleep(turn.wait_s)
                result = await self._turn(index, turn)
                self._turns.append(result)
                self._on_turn(result)
        except ReplayError as error:
            log.warning(
                "conversation %s turn %d failed: %s", self._conversation.id, len(self._turns) + 1, error
            )
            return self._result(Outcome.FAILED, f"turn {len(self._turns) + 1}: {error}")
        return self._result(Outcome.DONE)

    def unfinished(self) -> ConversationResult:
        """What is known of it when it was stopped from outside."""
        return self._result(Outcome.UNFINISHED)

    async def _turn(self, index: int, turn: Turn) -> TurnResult:
        messages = self._dialogue.prompt(index)
        asked = self._now()
        answer, refusals = await self._ask(messages, turn.output_tokens)
        prompt = answer.prompt_tokens or self._dialogue.estimated_tokens
        new = max(1, prompt - self._dialogue.retained_tokens)
        self._dialogue.answered(index, answer)
        return TurnResult(
            ending=turn.ending,
            wait_s=turn.wait_s if index else 0.0,
            asked_s=asked,
            ttft_s=answer.first_at - self._epoch - asked,
            answered_s=answer.last_at - self._epoch,
            prompt_tokens=prompt,
            new_tokens=new,
            output_tokens=answer.completion_tokens or len(answer.arrivals),
            cached_tokens=answer.cached_tokens,
            longest_gap_s=max((b - a for a, b in pairwise(answer.arrivals)), default=0.0),
            refusals=refusals,
        )

    async def _ask(self, messages: list[Message], output_tokens: int) -> tuple[Answer, int]:
        """Come back when told to, as agents' clients do; the time counts."""
        refusals = 0
        while True:
            try:
                return await self._client.ask(messages, output_tokens, self._conversation.id), refusals
            except Refused as refused:
                self._refusals += 1
                refusals += 1
                if refusals > self._retries:
                    raise ReplayError(f"refused {refusals} times; last: {refused}") from refused
                await self._sleep(refused.retry_after_s)

    def _now(self) -> float:
        return self._clock() - self._epoch

    def _result(self, outcome: Outcome, error: str = "") -> ConversationResult:
        return ConversationResult(
            id=self._conversation.id,
            arrival_s=self._conversation.arrival_s,
            started_s=self._started_s,
            outcome=outcome,
            effective_turn=self._conversation.effective_turn,
            turns=tuple(self._turns),
            refusals=self._refusals,
            error=error,
        )
