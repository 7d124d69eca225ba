"""Messages between gateways and the directory, as plain data that `rpc.py` sends unchanged."""

from dataclasses import dataclass, field
from typing import Any

from placement.engines import EngineInfo, EngineState
from placement.routing.prefix_map import PromptPrefix
from placement.routing.receipts import Refusal
from placement.sizing.capacity import Recommendation, Signals
from router.directory.api.rpc import Method
from router.identity.prefix_chain import End


@dataclass(frozen=True, slots=True)
class Ask:
    """Request for the placement of a turn.

    The turn is the first of a conversation, a later one whose prompt a prefiller may compute
    (`uncached_tokens`), or one whose decoder was lost (`lost`).
    """

    key: str
    gateway: str
    prompt_tokens: int
    wait_s: float
    parent: str | None = None
    uncached_tokens: int | None = None
    lost: tuple[str, int] | None = None  # engine and epoch that did not answer
    end: End | None = None  # end of the prompt, which becomes the conversation's newest node
    turn: int = 0  # the gateway's number of the turn; the report of its end has it too
    again: bool = False  # an earlier call with this request got no answer, so the turn never ran
    queue_weight: float = 0.0  # seconds by which the turn's class moves it forward among all turns
    priority_weight: float = 0.0  # seconds by which its priority moves it forward among its owner's turns
    alone: bool = False  # the conversation has no other turn at this gateway (reports may be on their way)
    prefixes: tuple[PromptPrefix, ...] = ()  # prefixes that other prompts may share, by length
    flow: str = ""  # the turn's flow: an owner's flows are served fairly
    waiting_share: float = 1.0  # share of the waiting places that the owner's turns may take
    answers: int = 1  # answers that the turn asks for; each gets KV of its own

    @property
    def owner(self) -> str:
        owner, colon, _ = self.key.partition(":")
        return owner if colon else ""

    @property
    def owner_weight(self) -> float:
        """Weight of the turn's class and priority among the turns of its owner, in seconds."""
        return self.queue_weight + self.priority_weight


@dataclass(frozen=True, slots=True)
class Placed:
    key: str
    engine: str
    epoch: int
    prefiller: str | None  # None: the decoder computes the prompt
    known: bool  # the conversation was bound before this turn
    cause: str
    note: dict[str, Any]  # cause, engines, receipt
    context_tokens: int


@dataclass(frozen=True, slots=True)
class PlaceAnswer:
    """Placement or refusal of the turn whose request is at position `index` in the call."""

    index: int
    placed: Placed | None = None
    refused: Refusal | None = None


@dataclass(frozen=True, slots=True)
class IdentifyRequest:
    """Request for the conversation that a prompt continues.

    A gateway asks twice. Its first request has the links of the prompt's chain, and the answer says how many
    bytes after each link known prompts ended. The second request has the digests of the prompt's prefixes
    that end there. Both lists begin with the longest prefix.
    """

    links: tuple[bytes, ...] = ()
    digests: tuple[bytes, ...] = ()
    name: str = ""  # prefix of a conversation's id that is preferred


@dataclass(frozen=True, slots=True)
class FoundHolder:
    conversation: str
    tip: bool
    running: bool


@dataclass(frozen=True, slots=True)
class IdentifyReply:
    index: int = -1  # index of the longest known prefix in the request's list
    holders: tuple[FoundHolder, ...] = ()
    tails: tuple[tuple[int, tuple[int, ...]], ...] = ()  # index of a link, lengths of its known tails


@dataclass(frozen=True, slots=True)
class PrefillDone:
    lost: tuple[str, int] | None = None  # prefiller and its epoch, if it could not be reached
    tokens: int = 0  # prompt tokens by the prefiller's count; 0: it did not compute the prompt
    cached: int | None = None  # how many of them the prefiller had cached; None: it does not report that


@dataclass(frozen=True, slots=True)
class TurnEnded:
    prompt_tokens: int = 0  # 0: the turn failed
    completion_tokens: int = 0
    tool_call: bool = False  # the answer calls a tool, so that the next turn needs no user
    met: tuple[str, ...] = ()  # SLO targets of the answer that were met
    missed: tuple[str, ...] = ()
    first_token_s: float = 0.0  # seconds from placement to first token; 0: not placed, or not streamed
    handover_s: float = 0.0  # seconds from the end of prefill to the first token, minus one token's time
    ttl_s: float = 0.0  # seconds without a turn after which the conversation ends; 0: the default
    cached: int | None = None  # prompt tokens that the decoder had cached; None: it does not report that

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


FAILED = TurnEnded()


@dataclass(frozen=True, slots=True)
class Activity:
    """Event of a turn: it began, was prefilled, had its first token, or ended."""

    key: str
    turn: int = 0  # number of the turn, as in `Ask`
    began: End | None = None
    prefilled: PrefillDone | None = None
    first_token: bool = False
    ended: TurnEnded | None = None


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Report of a gateway on its turns. It is sent again until it is answered, so it may arrive twice."""

    gateway: str
    activities: tuple[Activity, ...]
    first: int  # number of the first activity, counted from the gateway's start


@dataclass(frozen=True, slots=True)
class Spent:
    """Usage of a key at a gateway: what was granted since the last report, and the turns that run there."""

    key: str
    requests: int
    tokens: int
    turns: int


@dataclass(frozen=True, slots=True)
class SpentRequest:
    gateway: str
    spent: tuple[Spent, ...]


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """Request for a gateway's stream of pushes; while it is open, the gateway is present."""

    gateway: str
    metrics: str = ""  # host:port of this gateway process's metrics page


@dataclass(frozen=True, slots=True)
class EngineRecord:
    info: EngineInfo
    state: EngineState  # with seq 0 until the engine has reported to this directory
    suspect: bool
    conversations: int = 0
    kv_in_use: int = 0  # tokens, with reservations for conversations that the engine has not reported yet


@dataclass(frozen=True, slots=True)
class Engines:
    engines: tuple[EngineRecord, ...]
    settled: bool  # False soon after a restart of the directory, when engines that run may be missing


@dataclass(frozen=True, slots=True)
class Push:
    """Changes that the directory pushes to a gateway."""

    engines: Engines | None = None
    ended: tuple[tuple[str, str], ...] = ()  # conversation, cause
    foreign: tuple[str, ...] = ()  # conversations that another gateway serves now
    spent: tuple[tuple[str, Spent], ...] = ()  # what keys spent at other gateways
    # Conversation, engine and epoch; gateways use them while the directory is unreachable.
    bound: tuple[tuple[str, str, int], ...] = ()
    term: int = 0  # the directory's term


@dataclass(frozen=True, slots=True)
class EndRequest:
    key: str
    cause: str


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    key: str
    due_in_s: float  # until the conversation's next turn is expected


@dataclass(frozen=True, slots=True)
class ListRequest:
    prefix: str
    after: str | None
    limit: int


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    engines: tuple[EngineRecord, ...]
    metrics: str  # host:port of the directory's metrics page
    gateways: tuple[str, ...]  # metrics pages of the gateway processes
    batch: tuple[str, ...]  # metrics page of the batch process, if one runs
    journal_problem: str = ""  # why new conversations are refused


@dataclass(frozen=True, slots=True)
class CapacityReport:
    signals: Signals
    advice: tuple[Recommendation, ...]


@dataclass(frozen=True, slots=True)
class TimelineReport:
    """Recent events of conversations, for the dashboard."""

    now: float = 0.0
    conversations: list[dict[str, Any]] = field(default_factory=list)
    met: dict[str, int] = field(default_factory=dict)  # answers by SLO target
    missed: dict[str, int] = field(default_factory=dict)


Described = dict[str, Any]  # a conversation, as the API shows it

_SERVICE = "/conserve.directory.v2.Directory"
# Requests of turns that begin together. Each is answered as soon as possible, within its `wait_s`.
Asks = tuple[Ask, ...]
PlaceAnswers = tuple[PlaceAnswer, ...]
PLACE = Method[Asks, PlaceAnswers](f"{_SERVICE}/Place", Asks, PlaceAnswers)
IDENTIFY = Method[IdentifyRequest, IdentifyReply](f"{_SERVICE}/Identify", IdentifyRequest, IdentifyReply)
# Events of turns, in order. The answer names conversations that are to be placed again.
REPORT = Method[ReportRequest, tuple[str, ...]](f"{_SERVICE}/Report", ReportRequest, tuple[str, ...])
SPEND = Method[SpentRequest, None](f"{_SERVICE}/Spend", SpentRequest, None)  # passed on to the other gateways
END = Method[EndRequest, bool](f"{_SERVICE}/End", EndRequest, bool)  # whether the key was known
PREFETCH = Method[PrefetchRequest, str](f"{_SERVICE}/Prefetch", PrefetchRequest, str)  # the outcome
WATCH = Method[WatchRequest, Push](f"{_SERVICE}/Watch", WatchRequest, Push)
DESCRIBE = Method[str, Described | None](f"{_SERVICE}/Describe", str, Described | None)
LIST = Method[ListRequest, list[Described]](f"{_SERVICE}/List", ListRequest, list[Described])
STATUS = Method[None, DirectoryStatus](f"{_SERVICE}/Status", None, DirectoryStatus)
CAPACITY = Method[None, CapacityReport](f"{_SERVICE}/Capacity", None, CapacityReport)
TIMELINE = Method[float, TimelineReport](f"{_SERVICE}/Timeline", float, TimelineReport)  # of the last seconds
