"""The messages of a conversation as an agent would send them, sized to the trace's tokens.

Sizes correct themselves: each answer says how many tokens the prompt really had, and the next message makes
up the difference, so errors of the character estimate do not add up over a conversation.
"""

from dataclasses import dataclass

from traces.format import Conversation, Ending, Turn
from traces.replay import words
from traces.replay.calibration import Calibration, tool_call
from traces.replay.client import Answer, Message
from traces.replay.options import ToolStyle

BLOCK_SLACK = 128  # sources count cached tokens in whole blocks: a little less than everything is everything


@dataclass(slots=True)
class _Piece:
    message: Message
    tokens: float


class Dialogue:
    def __init__(
        self, conversation: Conversation, sizes: Calibration, tools: ToolStyle, salt: str, root: str
    ) -> None:
        self._conversation = conversation
        self._sizes = sizes
        self._tools = tools
        self._name = f"{salt}/{conversation.id}"
        self._root = f"{salt}/{root}"
        self._pieces: list[_Piece] = []
        self._prompt_tokens = 0.0  # of the latest prompt, as counted by the endpoint where it says
        self._answer_tokens = 0.0
        self.retained_tokens = 0  # of the latest prompt: what a server that forgets nothing has already

    def prompt(self, index: int) -> list[Message]:
        """The messages of turn `index`; every turn before it must have been answered."""
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
        """Of the latest prompt, for endpoints that do not report usage."""
        return round(sum(piece.tokens for piece in self._pieces) + self._sizes.opening_tokens)

    def answered(self, index: int, answer: Answer) -> None:
        turn = self._conversation.turns[index]
        estimate = self.estimated_tokens
        self._prompt_tokens = float(answer.prompt_tokens or estimate)
        self._answer_tokens = float(answer.completion_tokens or len(answer.arrivals))
        self._pieces[-1].tokens += self._prompt_tokens - estimate
        message: Message = {"role": "assistant", "content": answer.text}
        if turn.ending is Ending.TOOL_USE and self._tools is ToolStyle.CALLS:
            message["tool_calls"] = [tool_call(index)]
        self._pieces.append(_Piece(message, self._answer_tokens))

    def _open(self, turn: Turn) -> None:
        """A child begins with its parent's first words, as many as the trace says it shares."""
        wanted = turn.prompt_tokens - self._sizes.opening_tokens
        shared = self._sizes.characters(turn.cached_tokens) if turn.cached_tokens else 0
        own = max(1, self._sizes.characters(wanted) - shared)
        content = words.text(f"{self._root}/0", shared) + words.text(f"{self._name}/0", own)
        self._pieces = [_Piece({"role": "user", "content": content}, wanted)]

    def _append(self, index: int, turn: Turn) -> None:
        missing = turn.prompt_tokens - self._prompt_tokens - self._answer_tokens - self._sizes.exchange_tokens
        self._pieces.append(self._following(index, max(1.0, missing)))

    def _following(self, index: int, tokens: float) -> _Piece:
        content = words.text(f"{self._name}/{index}", self._sizes.characters(tokens))
        calls = self._pieces[-1].message.get("tool_calls")
        if calls:
            message = {"role": "tool", "tool_call_id": calls[0]["id"], "content": content}
        else:
            message = {"role": "user", "content": content}
        return _Piece(message, tokens + self._sizes.exchange_tokens)

    def _break_off(self, index: int, turn: Turn) -> None:
        """The prefix broke (compaction, an edited history): keep what is still cached, then go on anew."""
        kept: list[_Piece] = []
        room = float(turn.cached_tokens - self._sizes.opening_tokens)
        tail = ""
        for piece in self._pieces:
            if piece.tokens > room:
                tail = _beginning(piece, max(0.0, room)) if piece.message["role"] != "assistant" else ""
                break
            kept.append(piece)
            room -= piece.tokens
        while kept and kept[-1].message["role"] == "assistant":
            kept.pop()
        held = sum(piece.tokens for piece in kept) + self._sizes.opening_tokens
        wanted = max(1.0, turn.prompt_tokens - held)
        fresh = max(1, self._sizes.characters(wanted) - len(tail))
        content = tail + words.text(f"{self._name}/{index}", fresh)
        self._pieces = [*kept, _Piece({"role": "user", "content": content}, wanted)]


def _goes_on(before: Turn, turn: Turn) -> bool:
    """Everything of the prompt before is still there."""
    return turn.cached_tokens >= before.prompt_tokens - BLOCK_SLACK and (
        turn.prompt_tokens > before.prompt_tokens
    )


def _beginning(piece: _Piece, tokens: float) -> str:
    content = str(piece.message["content"])
    return content[: int(len(content) * tokens / piece.tokens)] if piece.tokens else ""
