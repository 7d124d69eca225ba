"""What a policy inside an engine sees and answers: plain data, which the simulator builds as well."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from placement.latency import BatchWork, LatencyModel


@dataclass(frozen=True, slots=True)
class Slo:
    """What an online request was promised."""

    ttft_s: float = 2.0
    tbt_s: float = 0.2


DEFAULT_SLO = Slo()


@dataclass(frozen=True, slots=True)
class Row:
    """A request as a policy sees it, before an iteration."""

    key: str
    offline: bool
    arrival: float  # on the clock of the view
    tokens: int  # prompt and what was generated so far
    computed: int  # tokens whose KV is on the accelerator
    blocks: int = 0  # blocks of KV it holds
    saved_blocks: int = 0  # of its blocks, how many the host has too: what a preemption does not lose
    restore_blocks: int = 0  # blocks to bring back from the host before it can run
    running: bool = False
    last_token: float | None = None  # when its latest output token was made; None before the first
    last_served: float = 0.0  # when it last had tokens in an iteration
    slo: Slo = DEFAULT_SLO

    @property
    def pending(self) -> int:
        """Tokens to compute before the next output token."""
        return max(self.tokens - self.computed, 1)

    @property
    def decoding(self) -> bool:
        """Whether it has had its first token and lacks only the next."""
        return self.running and self.last_token is not None and self.pending == 1

    def deadline(self) -> float:
        """When its next token is due."""
        if self.last_token is None:
            return self.arrival + self.slo.ttft_s
        return self.last_token + self.slo.tbt_s


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine between two iterations. `online_waiting` is in the order the engine will admit it."""

    now: float
    running: tuple[Row, ...]
    online_waiting: tuple[Row, ...]
    offline_waiting: int
    offline_head: Row | None  # the offline row that waits longest, if any
    free_blocks: int
    total_blocks: int
    block_tokens: int
    max_tokens: int  # per iteration
    max_running: int


@dataclass(slots=True)
class Filling:
    """The iteration being filled. The engine offers candidates in order; each is told its tokens."""

    model: LatencyModel
    work: BatchWork  # of online rows, running and waiting; offline joins as it is taken
    tokens_left: int  # of the iteration, not spoken for by online rows
    target_s: float | None  # what the iteration may take; None: as long as it likes
    online_left: int | None = None  # tokens online rows may still take; None: all there are
    rows_left: int | None = None  # more offline rows than this do not join; None: no limit
    floor: Callable[[Row], int] = lambda row: 0  # tokens an offline row gets though the target says none
    admit_waiting: bool = True  # whether offline rows that hold no memory may start
    caps: Mapping[str, int] = field(default_factory=dict)  # of online rows; others get all they want
    offline_tokens: int = 0

    def room(self) -> int:
        """Offline tokens that would still fit: those of a row without context, by the model."""
        if self.target_s is None:
            return self.tokens_left
        return self.model.max_tokens(self.work, 0, self.tokens_left, self.target_s)

    def take(self, row: Row, want: int) -> int:
        if not row.offline:
            return self._take_online(row, want)
        want = min(want, self.tokens_left)
        if want <= 0 or self.rows_left == 0 or not (row.running or self.admit_waiting):
            return 0
        tokens = want
        if self.target_s is not None:
            tokens = self.model.max_tokens(self.work, row.computed, want, self.target_s)
            tokens = max(tokens, min(want, self.floor(row)))
        if tokens == 0:
            return 0
        self.work = self.work.plus(tokens, row.computed)
        self.tokens_left -= tokens
        self.offline_tokens += tokens
        if self.rows_left is not None:
            self.rows_left -= 1
        return tokens

    def _take_online(self, row: Row, want: int) -> int:
        want = min(want, self.caps.get(row.key, want))
        if self.online_left is None:
            return want
        tokens = min(want, self.online_left)
        self.online_left -= tokens
        return tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy decides before an iteration."""

    order: tuple[str, ...]  # of the running rows
    preempt: tuple[str, ...]  # running offline rows that give their memory and slot back now
    filling: Filling = field(compare=False)


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """The iteration on the accelerator, as an arrival finds it."""

    work: BatchWork
    online_work: BatchWork
    offline_rows: int
    online_rows: int
    seconds: float  # the model's estimate for all of it
    passed_s: float
    slack_s: float | None  # from its start until the first of its online rows' tokens is due; None: none are


@dataclass(frozen=True, slots=True)
class IterationDone:
    """An iteration that ended: what was expected of it and what it took."""

    now: float
    work: BatchWork
    predicted_s: float
    seconds: float
    online_rows: int
    offline_rows: int
    late_rows: int  # online rows whose token came after its deadline
    aborted: bool
