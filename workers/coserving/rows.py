"""vLLM's requests as the rows a policy sees."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from placement.serving.state import Row, Slo

logger = logging.getLogger("conserve.workers.rows")

TTFT_ARGUMENT = "slo_ttft_ms"
TBT_ARGUMENT = "slo_tbt_ms"


@dataclass(slots=True)
class Track:
    """What is remembered of a request beside vLLM's own record."""

    request: Any
    offline: bool
    arrival: float  # on the scheduler's clock
    slo: Slo
    last_token: float | None = None
    last_served: float = 0.0
    outputs: int = 0
    held: int = 0  # tokens it had computed when it was last preempted
    adopted: tuple[int, ...] = ()  # blocks taken as prefix hits at its last admission, by KV cache group

    @property
    def deadline(self) -> float:
        """When its next token is due."""
        if self.last_token is None:
            return self.arrival + self.slo.ttft_s
        return self.last_token + self.slo.tbt_s


def slo_of(arguments: Mapping[str, Any], default: Slo) -> Slo:
    """The promise a request brings (`vllm_xargs`: slo_ttft_ms, slo_tbt_ms), else the engine's."""
    try:
        ttft = float(arguments[TTFT_ARGUMENT]) / 1000 if TTFT_ARGUMENT in arguments else default.ttft_s
        tbt = float(arguments[TBT_ARGUMENT]) / 1000 if TBT_ARGUMENT in arguments else default.tbt_s
    except (TypeError, ValueError):
        logger.warning("slo of a request is not a number of milliseconds, the engine's is used")
        return default
    if not (ttft > 0 and tbt > 0):
        logger.warning("slo of a request is not above zero, the engine's is used")
        return default
    return Slo(ttft, tbt)


@dataclass(slots=True)
class Rows:
    """Requests of an engine by class, in order of arrival. Ended ones are dropped as they are met."""

    default_slo: Slo
    arguments_of: Callable[[Any], Mapping[str, Any]]
    blocks_of: Callable[[Any], int]
    saved_blocks_of: Callable[[Any], int]
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    tracks: dict[str, Track] = field(default_factory=dict)
    _online: dict[str, Track] = field(default_factory=dict)
    _offline: dict[str, Track] = field(default_factory=dict)

    def add(self, request: Any) -> Track:
        # vLLM stamps an arrival with the wall clock of its front end; ages are kept, clocks are not mixed.
        age = max(self.wall() - request.arrival_time, 0.0)
        offline = request.priority > 0
        slo = slo_of(self.arguments_of(request), self.default_slo)
        track = Track(request, offline, self.clock() - age, slo)
        self.tracks[request.request_id] = track
        (self._offline if offline else self._online)[request.request_id] = track
        return track

    def drop(self, request_id: str) -> None:
        self.tracks.pop(request_id, None)
        self._online.pop(request_id, None)
        self._offline.pop(request_id, None)

    def online(self) -> Iterator[Track]:
        yield from self._online.values()

    def offline_head(self, at_most: int, is_waiting: Callable[[Any], bool]) -> Track | None:
        """The oldest offline request that waits. At most `at_most` older ones can be running."""
        first = islice(self._offline.values(), at_most + 1)
        return next((track for track in first if is_waiting(track.request)), None)

    @property
    def offline_count(self) -> int:
        return len(self._offline)

    def row(self, track: Track, running: bool, computed: int | None = None) -> Row:
        request = track.request
        return Row(
            key=request.request_id,
            offline=track.offline,
            arrival=track.arrival,
            tokens=request.num_tokens,
            computed=request.num_computed_tokens if computed is None else computed,
            blocks=self.blocks_of(request),
            saved_blocks=self.saved_blocks_of(request) if track.offline else 0,
            running=running,
            last_token=track.last_token,
            last_served=track.last_served,
            slo=track.slo,
        )

    def served(self, request: Any, now: float) -> bool:
        """After an iteration that held the request. Whether an online token came after its deadline."""
        track = self.tracks.get(request.request_id)
        if track is None:
            return False
        track.last_served = now
        if request.num_output_tokens <= track.outputs:
            return False
        track.outputs = request.num_output_tokens
        late = not track.offline and now > track.deadline
        track.last_token = now
        return late
