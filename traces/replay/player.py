"""Plays one conversation as its agent would: ask, wait for the tool, append its result, and ask again."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from traces import ReplayError
from traces.format import TraceConversation, TraceTurn, TurnEnding
from traces.replay.client import (
    Calibration,
    ChatClient,
    Clock,
    Message,
    Refused,
    TimedAnswer,
    ToolStyle,
    text,
    tool_call,
)
from traces.replay.results import ConversationResult, PlayOutcome, TurnResult

BLOCK_SLACK = 128  # sources count cached tokens in whole blocks, so a few tokens less still mean everything


@dataclass(slots=True)
class _Piece:
    message: Message
    tokens: float


class Dialogue:
    """The messages of a conversation as an agent would send them, with as many tokens as the trace says.

    Sizes correct themselves: each answer says how many tokens the prompt really had, and the next message
    makes up the difference. So errors of the character estimate do not add up over a conversation.
    """

    def __init__(
        self, conversation: TraceConversation, sizes: Calibration, tools: ToolStyle, salt: str, root: str
    ) -> None:
        self._conversation = conversation
        self._sizes = sizes
        self._tools = tools
        self._name = f"{salt}/{conversation.id}"
        self._root = f"{salt}/{root}"
        self._pieces: list[_Piece] = []
        self._prompt_tokens = 0.0  # of the latest prompt, by the endpoint's count if it has one
        self._answer_tokens = 0.0
        self.retained_tokens = 0  # tokens of the latest prompt that a server that forgets nothing has cached

    def prompt(self, index: int) -> list[Message]:
        """Return the messages of turn `index`. All earlier turns must have been answered."""
        turn = self._conversation.turns[index]
        if index == 0:
            self.retained_tokens = 0
            self._open(turn)
        elif _goes_on(self._conversation.turns[index - 1], turn):
            self.retained_tokens = round(self._prompt_tokens + self._answer_tokens)
            self._append(index, turn)
        else:
            self.retained_tokens = turn.cached_tokens
            self._break_off(index, turn)
        return [piece.message for piece in self._pieces]

    @property
    def estimated_tokens(self) -> int:
        """Return the estimated tokens of the latest prompt, for endpoints that do not report usage."""
        return round(sum(piece.tokens for piece in self._pieces) + self._sizes.opening_tokens)

    def answered(self, index: int, answer: TimedAnswer) -> None:
        turn = self._conversation.turns[index]
        estimate = self.estimated_tokens
        self._prompt_tokens = float(answer.prompt_tokens or estimate)
        self._answer_tokens = float(answer.completion_tokens or len(answer.arrivals))
        self._pieces[-1].tokens += self._prompt_tokens - estimate
        message: Message = {"role": "assistant", "content": answer.text}
        if turn.ending is TurnEnding.TOOL_USE and self._tools is ToolStyle.CALLS:
            message["tool_calls"] = [tool_call(index)]
        self._pieces.append(_Piece(message, self._answer_tokens))

    def _open(self, turn: TraceTurn) -> None:
        """Make the first message, which begins with as much of the parent's text as the trace says."""
        wanted = turn.prompt_tokens - self._sizes.opening_tokens
        shared = self._sizes.characters(turn.cached_tokens) if turn.cached_tokens else 0
        own = max(1, self._sizes.characters(wanted) - shared)
        content = text(f"{self._root}/0", shared) + text(f"{self._name}/0", own)
        self._pieces = [_Piece({"role": "user", "content": content}, wanted)]

    def _append(self, index: int, turn: TraceTurn) -> None:
        missing = turn.prompt_tokens - self._prompt_tokens - self._answer_tokens - self._sizes.exchange_tokens
        self._pieces.append(self._following(index, max(1.0, missing)))

    def _following(self, index: int, tokens: float) -> _Piece:
        content = text(f"{self._name}/{index}", self._sizes.characters(tokens))
        calls = self._pieces[-1].message.get("tool_calls")
        if calls:
            message = {"role": "tool", "tool_call_id": calls[0]["id"], "content": content}
        else:
            message = {"role": "user", "content": content}
        return _Piece(message, tokens + self._sizes.exchange_tokens)

    def _break_off(self, index: int, turn: TraceTurn) -> None:
        """Keep the cached beginning of a prompt whose rest changed (by compaction, say), and add new text."""
        kept: list[_Piece] = []
        left = float(turn.cached_tokens - self._sizes.opening_tokens)
        tail = ""
        for piece in self._pieces:
            if piece.tokens > left:
                tail = _beginning(piece, max(0.0, left)) if piece.message["role"] != "assistant" else ""
                break
            kept.append(piece)
            left -= piece.tokens
        while kept and kept[-1].message["role"] == "assistant":
            kept.pop()
        held = sum(piece.tokens for piece in kept) + self._sizes.opening_tokens
        wanted = max(1.0, turn.prompt_tokens - held)
        fresh = max(1, self._sizes.characters(wanted) - len(tail))
        content = tail + text(f"{self._name}/{index}", fresh)
        self._pieces = [*kept, _Piece({"role": "user", "content": content}, wanted)]


def _goes_on(before: TraceTurn, turn: TraceTurn) -> bool:
    """Return whether a turn's prompt still contains the whole previous prompt."""
    return turn.cached_tokens >= before.prompt_tokens - BLOCK_SLACK and (
        turn.prompt_tokens > before.prompt_tokens
    )


def _beginning(piece: _Piece, tokens: float) -> str:
    content = str(piece.message["content"])
    return content[: int(len(content) * tokens / piece.tokens)] if piece.tokens else ""


log = logging.getLogger("conserve.traces.replay")


class Player:
    """Plays a conversation. Its results so far stay available if a time limit stops it."""

    def __init__(
        self,
        conversation: TraceConversation,
        dialogue: Dialogue,
        client: ChatClient,
        clock: Clock,
        epoch: float,
        retries: int,
        on_turn: Callable[[TurnResult], None],
    ) -> None:
        self._conversation, self._dialogue, self._client = conversation, dialogue, client
        self._clock, self._epoch, self._retries, self._on_turn = clock, epoch, retries, on_turn
        self._started_s = 0.0
        self._turns: list[TurnResult] = []
        self._refusals = 0

    async def play(self) -> ConversationResult:
        self._started_s = self._now()
        try:
            for index, turn in enumerate(self._conversation.turns):
                if index:
                    await asyncio.sleep(turn.wait_s)
                result = await self._turn(index, turn)
                self._turns.append(result)
                self._on_turn(result)
        except ReplayError as error:
            log.warning(
                "conversation %s turn %d failed: %s", self._conversation.id, len(self._turns) + 1, error
            )
            return self._result(PlayOutcome.FAILED, f"turn {len(self._turns) + 1}: {error}")
        return self._result(PlayOutcome.DONE)

    def unfinished(self) -> ConversationResult:
        """Return the measurements of a conversation that was stopped from outside."""
        return self._result(PlayOutcome.UNFINISHED)

    async def _turn(self, index: int, turn: TraceTurn) -> TurnResult:
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

    async def _ask(self, messages: list[Message], output_tokens: int) -> tuple[TimedAnswer, int]:
        """Send a request until it is answered; return the answer, and how often it was refused before.

        A refused turn waits as long as the refusal says, and that time counts.
        """
        refusals = 0
        while True:
            try:
                return await self._client.ask(messages, output_tokens, self._conversation.id), refusals
            except Refused as refused:
                self._refusals += 1
                refusals += 1
                if refusals > self._retries:
                    raise ReplayError(f"refused {refusals} times; last: {refused}") from refused
                await asyncio.sleep(refused.retry_after_s)

    def _now(self) -> float:
        return self._clock() - self._epoch

    def _result(self, outcome: PlayOutcome, error: str = "") -> ConversationResult:
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
