"""vLLM's real scheduler under ours, with a worker that tracks KV instead of computing it.

Every slot of KV remembers the prefix that it was computed for. A request that attends to a slot of another
prefix would get a wrong output from a real model; here it adds an entry to `lies`.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer.config import SEVERAL, SEVERAL_MODULE, ConnectorConfig
from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import LatencyModel, SelfCorrecting
from workers.engine.coserving import rollback
from workers.engine.coserving import safepoint as page
from workers.engine.coserving.config import SAFEPOINT_PLUGIN, SCHEDULER_CLASS, CoServingConfig

BLOCK, BLOCKS, GARBAGE = 32, 48, -1
# Tokens cost nothing, and every iteration with an offline request is worth arming.
FAST = LatencyModel(1e-6, 0, 0, 0.03, per_request=6e-3)
EASY = TurnTargets(10.0, 10.0)


class SeededClock:
    """Clock that each iteration advances by a duration drawn from a seed, so that a storm replays exactly.

    Plans depend on time, because a policy learns from measured iterations. An iteration takes from an instant
    to seconds, and long series of them are fast or slow, as on a machine that others use too.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now = 1000.0
        self._stretch = 1.0

    def __call__(self) -> float:
        return self._now

    def run_step(self) -> None:
        if self._rng.random() < 0.1:
            self._stretch = self._rng.choice((0.01, 0.1, 1.0, 10.0))
        self._now += FAST.constant * self._stretch * self._rng.choice((0.1, 0.5, 1.0, 1.0, 2.0, 30.0))


@dataclass(frozen=True)
class StepRequest:
    """Request of an iteration, with the tokens and blocks that it had when the iteration was scheduled."""

    key: str
    request: Any
    count: int  # tokens that the iteration computes
    end: int  # tokens of the request that are computed after the iteration
    blocks: tuple[list[int], ...]  # by KV cache group


class ModelFreeEngine:
    def __init__(
        self,
        model: Path,
        left_out: rollback.Step | None = None,
        seed: int = 0,
        slo: TurnTargets = EASY,
        policy: str = "conserve",
        plugins: tuple[str, ...] = (),
        beside: dict[str, Any] | None = None,
        scheduler: str = SCHEDULER_CLASS,
        latency: LatencyModel = FAST,
        margin: float = 0.1,
        overlapping: bool = False,
        clock: Callable[[], float] | None = None,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        """Start an engine. `beside` is a second connector, as in `--kv-transfer-config`.

        `windows`: how many tokens the layers of each KV cache group attend to; 0: all of them.
        `clock`: replaces the clock that `seed` determines.
        """
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        serving = ServingSettings(policy, slo, margin)
        config = CoServingConfig(serving, latency, profiled=True)
        connector = ConnectorConfig(
            safepoint=f"conserve-test-{uuid.uuid4().hex[:8]}",
            plugins=(SAFEPOINT_PLUGIN, *plugins),
            transfer=False,
        )
        transfer = connector.to_kv_transfer_config()
        if beside is not None:
            several = {"kv_connector": SEVERAL, "kv_connector_module_path": SEVERAL_MODULE}
            extra = {"connectors": [beside, transfer]}
            transfer = {**transfer, **several, "kv_connector_extra_config": extra}
        vllm_config = EngineArgs(
            model=str(model),
            dtype="float32",
            max_model_len=1024,
            block_size=BLOCK,
            max_num_seqs=8,
            num_gpu_blocks_override=BLOCKS * len(windows),
            max_num_batched_tokens=192,
            enforce_eager=True,
            async_scheduling=False,
            scheduling_policy="priority",
            scheduler_cls=scheduler,
            additional_config=config.to_additional_config(),
            kv_transfer_config=transfer,
        ).create_engine_config()
        vllm_config.cache_config.num_gpu_blocks = BLOCKS * len(windows)
        vllm_config.scheduler_config.async_scheduling = overlapping  # vLLM for CPUs resets it above
        import torch

        shape: dict[str, Any] = {
            "block_size": BLOCK,
            "num_kv_heads": 2,
            "head_size": 64,
            "dtype": torch.float32,
        }
        groups = [
            KVCacheGroupSpec(
                [f"layer{number}"],
                SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape),
            )
            for number, window in enumerate(windows)
        ]
        self._windows = windows
        cache = KVCacheConfig(BLOCKS * len(windows), [], groups)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        make = vllm_config.scheduler_config.get_scheduler_cls()
        self.scheduler: Any = make(
            vllm_config, cache, StructuredOutputManager(vllm_config), BLOCK, log_stats=False
        )
        if latency is FAST:  # bound=1.0: steps without a model must not correct it
            self.scheduler.latency = SelfCorrecting(FAST, bound=1.0)
        self._seeded_clock = SeededClock(seed)
        self._clock = clock or self._seeded_clock
        self.scheduler.clock = self.scheduler.tracked.clock = self.scheduler.tracked.wall = self._clock
        self.scheduler.rollback_steps = tuple(step for step in rollback.STEPS if step is not left_out)
        self._flag = page.Flag(connector.safepoint)
        self._flag.remove()  # both sides have the page mapped, so its file can go
        self._rng = random.Random(seed)
        self._kv: dict[tuple[int, int], int] = {}
        self.lies: list[str] = []
        self.aborts = self.hung_up = 0
        self.outputs: dict[str, list[int]] = {}

    def ask(
        self,
        key: str,
        prompt: list[int],
        output: int,
        priority: int,
        queue_weight: float = 0.0,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        """Add a request; `queue_weight` is its class weight, `transfer` its `kv_transfer_params`."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        more = {"queue_weight": queue_weight, "kv_transfer_params": transfer}
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, extra_args=more)
        params.update_from_generation_config({}, 1)
        request = Request(
            key,
            prompt,
            params,
            None,
            arrival_time=self._clock(),
            priority=priority,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        self.outputs[key] = []

    def step(
        self, abort_share: float, hang_up_share: float = 0.0, loaded: frozenset[str] = frozenset()
    ) -> None:
        """Run one iteration, whose result says that the KV of the `loaded` requests has arrived."""
        from vllm.v1.request import RequestStatus

        done = self.scheduler.schedule()
        epoch = self.scheduler.plugin(page.NAME).armed
        aborted = bool(epoch) and self._rng.random() < abort_share
        rows = self.rows_of(done)
        sampled = self.forward(rows, aborted)
        if aborted:
            self.aborts += 1
            self._flag.fields[page.ABORTED] = epoch
        if rows and self._rng.random() < hang_up_share:
            gone = self._rng.choice(rows).key
            self.hung_up += 1
            self.outputs.pop(gone)
            self.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
        self.deliver(done, rows, [] if aborted else sampled, loaded | self.loads_ended())

    def loads_ended(self) -> frozenset[str]:
        """Hook: return the requests whose KV has arrived since the last result."""
        return frozenset()

    def rows_of(self, done: Any) -> list[StepRequest]:
        """Return the requests of an iteration as they are now; call this before the next is scheduled."""
        blocks_of = self.scheduler.kv_cache_manager.get_block_ids
        requests = self.scheduler.requests
        return [
            StepRequest(key, requests[key], count, requests[key].num_computed_tokens, blocks_of(key))
            for key, count in done.num_scheduled_tokens.items()
        ]

    def forward(self, rows: list[StepRequest], aborted: bool = False) -> list[list[int]]:
        self._seeded_clock.run_step()
        return [self._compute(row, aborted) for row in rows]

    def deliver(
        self,
        done: Any,
        rows: list[StepRequest],
        tokens: list[list[int]],
        loaded: frozenset[str] = frozenset(),
    ) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        keys = [row.key for row in rows]
        index = {key: number for number, key in enumerate(keys)}
        there = [row.request.is_finished() for row in rows]  # they get a token that is thrown away
        result = ModelRunnerOutput(keys, index, tokens)
        if loaded:
            result.kv_connector_output = KVConnectorOutput(finished_recving=set(loaded))
        self.scheduler.update_from_output(done, result)
        for key, gone, new in zip(keys, there, tokens, strict=False):
            if key in self.outputs and not gone:
                self.outputs[key] += new

    def _compute(self, row: StepRequest, aborted: bool) -> list[int]:
        """Compute a request's tokens even if the request has ended, which an accelerator cannot know."""
        tokens = list(row.request.all_token_ids)
        while len(tokens) < row.end:  # the client hung up, so the last sampled token was not recorded
            tokens.append(answer(tokens))
        for group, window in enumerate(self._windows):
            first = max(0, row.end - row.count - window + 1) if window else 0
            self._attend(row, tokens, group, first, aborted)
        return [answer(tokens)] if row.end == len(tokens) else []

    def fill(self, tokens: Sequence[int], blocks: tuple[list[int], ...], first: int, end: int) -> None:
        """Write the right KV at the positions from `first` to `end`, as a load from the host does."""
        for group in range(len(self._windows)):
            right = group
            for position, token in enumerate(tokens[:end]):
                right = hash((right, token))
                if position >= first and blocks[group][position // BLOCK]:  # not a null block
                    self._kv[blocks[group][position // BLOCK], position % BLOCK] = right

    def _attend(self, row: StepRequest, tokens: list[int], group: int, first: int, aborted: bool) -> None:
        right = group
        for position, token in enumerate(tokens[: row.end]):
            right = hash((right, token))  # hash of all tokens up to this one
            if position < first:
                continue
            slot = row.blocks[group][position // BLOCK], position % BLOCK
            if position >= row.end - row.count:
                # Where the KV is right already, an aborted pass writes the same values again.
                if not aborted or self._kv.get(slot) != right:
                    self._kv[slot] = GARBAGE if aborted else right
            elif not aborted and self._kv.get(slot) not in (right, None):
                self.lies.append(f"{row.key} reads {slot}, which holds something else")
            elif not aborted and slot not in self._kv:
                self.lies.append(f"{row.key} reads {slot}, which nobody computed")


def answer(tokens: list[int]) -> int:
    return 32 + hash(tuple(tokens)) % 80


def expected(prompt: list[int], output: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(output):
        tokens.append(answer(tokens))
    return tokens[len(prompt) :]
