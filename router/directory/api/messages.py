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

    It is the first of a conversation, a later one that may go through a prefiller (`uncached_tokens`), or one
    whose decoder was lost (`lost`).
    """

    key: str
    gateway: str
    prompt_tokens: int
    wait_s: float
    parent: str | None = None
    uncached_tokens: int | None = None
    lost: tuple[str, int] | None = None  # engine and epoch that did not answer
    end: End | None = None  # of the prompt, recorded as the conversation's newest node
    turn: int = 0  # the gateway's number of it, by which its end is known
    again: bool = False  # an earlier call with this very ask got no answer: what it placed did not run
    queue_weight: float = 0.0  # seconds that its class is worth, among all turns
    priority_weight: float = 0.0  # seconds that its client's priority is worth, among turns of its owner
    alone: bool = False  # no other turn of it runs at this gateway; its reports may be on their way
    prefixes: tuple[PromptPrefix, ...] = ()  # that other prompts may share, by length
    flow: str = ""  # of its owner's, which are served fairly among each other
    waiting_share: float = 1.0  # of the waiting places, that its owner's turns may take
    answers: int = 1  # that the turn asks for: each gets KV of its own

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
    known: bool  # it was bound already
    cause: str
    note: dict[str, Any]  # cause, engines, receipt
    context_tokens: int


@dataclass(frozen=True, slots=True)
class PlaceAnswer:
    """Answer to one request of a call: placed or refused."""

    index: int
    placed: Placed | None = None
    refused: Refusal | None = None


@dataclass(frozen=True, slots=True)
class IdentifyRequest:
    """Request for the conversation that a prompt continues.

    The first request has its links, longest prefix first. The second has the digests of prefixes with a tail
    that the first answer named, longest first.
    """

    links: tuple[bytes, ...] = ()
    digests: tuple[bytes, ...] = ()
    name: str = ""  # how the id of the conversation begins


@dataclass(frozen=True, slots=True)
class FoundHolder:
    conversation: str
    tip: bool
    running: bool


@dataclass(frozen=True, slots=True)
class IdentifyReply:
    index: int = -1  # of the longest known prefix in the question's list
    holders: tuple[FoundHolder, ...] = ()
    tails: tuple[tuple[int, tuple[int, ...]], ...] = ()  # links with known tails, lengths


@dataclass(frozen=True, slots=True)
class PrefillDone:
    lost: tuple[str, int] | None = None  # the prefiller and its epoch, when it could not be reached
    tokens: int = 0  # of the prompt, as the prefiller counted them; 0: it did not compute it
    cached: int | None = None  # of these, what it had, if it says so


@dataclass(frozen=True, slots=True)
class TurnEnded:
    prompt_tokens: int = 0  # 0: the turn came to nothing
    completion_tokens: int = 0
    tool_call: bool = False  # it asked for a tool: the conversation goes on without its user
    met: tuple[str, ...] = ()  # SLO targets of the answer that were met
    missed: tuple[str, ...] = ()
    first_token_s: float = 0.0  # from its placement; 0: it was not placed, or nobody could see the token
    handover_s: float = 0.0  # from the end of its prefill to that, less the time of one more token
    ttl_s: float = 0.0  # of silence, after which its client lets the conversation end; 0: it said nothing
    cached: int | None = None  # of its prompt, that its decoder had, if it says so

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


FAILED = TurnEnded()


@dataclass(frozen=True, slots=True)
class Activity:
    """Event of a turn: it began, was prefilled, had its first token, or ended."""

    key: str
    turn: int = 0  # as in `Ask`
    began: End | None = None
    prefilled: PrefillDone | None = None
    first_token: bool = False
    ended: TurnEnded | None = None


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Report of a gateway. A report without an answer is sent again, so it may arrive twice."""

    gateway: str
    activities: tuple[Activity, ...]
    first: int  # number of the first activity, counted from the gateway's start


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that a gateway granted to a key since its last report, and the key's running turns there."""

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
    metrics: str = ""  # host:port of this very process's metrics page


@dataclass(frozen=True, slots=True)
class EngineRecord:
    info: EngineInfo
    state: EngineState  # without a number (seq): it has not reported to this directory
    suspect: bool
    conversations: int = 0
    kv_in_use: int = 0  # with what is reserved for conversations that it has not reported yet


@dataclass(frozen=True, slots=True)
class Engines:
    engines: tuple[EngineRecord, ...]
    settled: bool  # false soon after a restart: engines may be missing that are alive


@dataclass(frozen=True, slots=True)
class Push:
    """Changes that the directory pushes to a gateway."""

    engines: Engines | None = None
    ended: tuple[tuple[str, str], ...] = ()  # conversation, cause
    foreign: tuple[str, ...] = ()  # another gateway serves these now
    spent: tuple[tuple[str, Spent], ...] = ()  # at other gateways
    bound: tuple[
        tuple[str, str, int], ...
    ] = ()  # conversation, engine, epoch: for when the directory is away
    term: int = 0  # of the directory


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
    gateways: tuple[str, ...]  # and of each gateway process's
    batch: tuple[str, ...]  # and of the batch process's
    journal_problem: str = ""  # why new conversations are refused


@dataclass(frozen=True, slots=True)
class CapacityReport:
    signals: Signals
    advice: tuple[Recommendation, ...]


@dataclass(frozen=True, slots=True)
class TimelineReport:
    """Recent events of conversations, for people to look at."""

    now: float = 0.0
    conversations: list[dict[str, Any]] = field(default_factory=list)
    met: dict[str, int] = field(default_factory=dict)  # answers by SLO target
    missed: dict[str, int] = field(default_factory=dict)


Described = dict[str, Any]  # a conversation, as the API shows it

_SERVICE = "/conserve.directory.v2.Directory"
# Turns that begin together. Each is answered as soon as it can be, and waits at most its `wait_s`.
Asks = tuple[Ask, ...]
PlaceAnswers = tuple[PlaceAnswer, ...]
PLACE = Method[Asks, PlaceAnswers](f"{_SERVICE}/Place", Asks, PlaceAnswers)
IDENTIFY = Method[IdentifyRequest, IdentifyReply](f"{_SERVICE}/Identify", IdentifyRequest, IdentifyReply)
# What happened to turns, in order; answered with conversations that are to be placed again.
REPORT = Method[ReportRequest, tuple[str, ...]](f"{_SERVICE}/Report", ReportRequest, tuple[str, ...])
SPEND = Method[SpentRequest, None](f"{_SERVICE}/Spend", SpentRequest, None)  # passed on to the other gateways
END = Method[EndRequest, bool](f"{_SERVICE}/End", EndRequest, bool)  # whether it was known
PREFETCH = Method[PrefetchRequest, str](f"{_SERVICE}/Prefetch", PrefetchRequest, str)  # the outcome
WATCH = Method[WatchRequest, Push](f"{_SERVICE}/Watch", WatchRequest, Push)
DESCRIBE = Method[str, Described | None](f"{_SERVICE}/Describe", str, Described | None)
LIST = Method[ListRequest, list[Described]](f"{_SERVICE}/List", ListRequest, list[Described])
STATUS = Method[None, DirectoryStatus](f"{_SERVICE}/Status", None, DirectoryStatus)
CAPACITY = Method[None, CapacityReport](f"{_SERVICE}/Capacity", None, CapacityReport)
TIMELINE = Method[float, TimelineReport](f"{_SERVICE}/Timeline", float, TimelineReport)  # of so many seconds
