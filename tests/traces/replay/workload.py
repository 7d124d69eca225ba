"""Small conversations for replays, and an observer of replays that only counts."""

from traces.format import TraceConversation, TraceTurn, TurnEnding
from traces.replay.results import ConversationResult, TurnResult


def agent(
    name: str,
    arrival: float = 0.0,
    turns: int = 4,
    first: int = 400,
    append: int = 60,
    out: int = 6,
    wait: float = 0.03,
) -> TraceConversation:
    built: list[TraceTurn] = []
    context = 0
    for index in range(turns):
        turn = TraceTurn(
            appended_tokens=append if index else first,
            cached_tokens=context,
            output_tokens=out,
            wait_s=wait if index else 0.0,
            ending=TurnEnding.END_OF_TURN if index == turns - 1 else TurnEnding.TOOL_USE,
        )
        context = turn.context_tokens
        built.append(turn)
    return TraceConversation(name, arrival, tuple(built))


class CountingObserver:
    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.begun: list[str] = []
        self.turns = 0
        self.results: list[ConversationResult] = []

    def phase(self, name: str, conversations: int) -> None:
        self.phases.append((name, conversations))

    def started(self, conversation: TraceConversation) -> None:
        self.begun.append(conversation.id)

    def answered(self, turn: TurnResult) -> None:
        self.turns += 1

    def ended(self, result: ConversationResult) -> None:
        self.results.append(result)
