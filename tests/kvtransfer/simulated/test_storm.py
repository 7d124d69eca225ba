"""A storm of random operations on a prefiller and a decoder, with real schedulers, connectors and sockets.

No KV leaks, no answer is wrong, and no step hangs. `CONSERVE_STORM_SEED` sets the seed, such as that of a
failed run; `CONSERVE_STORM_STEPS` (default 250) is the number of steps. A seed repeats a run only roughly,
because threads copy and fetch.
"""

import os
import random
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")


from kvtransfer.checkpoint.copier import Copier
from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.engine.sabotage import damage
from tests.kvtransfer.simulated.engine import BLOCK_TOKENS, SteppedEngine, next_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = int(os.environ.get("CONSERVE_STORM_STEPS", "250"))
LEASE_S = 0.3
HANG_S = 60
CONVERSATIONS = "abcdefgh"
# A second group of layers.
BESIDE: dict[str, dict[str, Any]] = {
    "one group": {},
    "windows beside": {"window": 3 * BLOCK_TOKENS + 7},
    "states beside": {"states": True},
    "states of the inner ends of blocks beside": {"states": True, "inner_states": True},
    "states beside, steps shorter than blocks": {"states": True, "batched_tokens": BLOCK_TOKENS - 12},
}


class SimulatedStorm:
    def __init__(self, seed: int, beside: Mapping[str, Any], disk: Path | None = None) -> None:
        self.rng = random.Random(seed)
        tiers = (
            {"host_kv_gib": 0.0004, "disk_gib": 0.001, "disk_path": str(disk)}
            if disk
            else {"host_kv_gib": 0.0012}
        )
        self.port = free_port()
        self.prefiller = SteppedEngine(
            ConnectorConfig(engine="p", epoch=1, port=self.port, lease_s=LEASE_S, timeout_s=1.0),
            blocks=100 if beside else 50,
            **beside,
        )
        self.decoder = SteppedEngine(
            ConnectorConfig(engine="d", timeout_s=1.0, park_after_s=0.05, **tiers),
            blocks=100 if beside else 60,
            **beside,
        )
        self.contexts = {key: self.said(150) for key in CONVERSATIONS}
        self.asked: dict[str, tuple[list[int], int, str]] = {}  # decoder's requests under way
        self.prefills: list[str] = []
        self.finished = 0
        self.wrong: list[str] = []

    def said(self, tokens: int) -> list[int]:
        return [self.rng.randrange(250) for _ in range(tokens)]

    def blow(self) -> None:
        actions = [
            (self.turn, 10),
            (self.transferred_turn, 5),
            (self.offline, 2),
            (self.restore, 3),
            (self.abort, 3),
            (self.park, 3),
            (self.release, 1),
            (self.compact, 1),
            (self.corrupt, 1),
            (self.reset, 1),
            (self.pause, 2),
        ]
        kinds, weights = zip(*actions, strict=True)
        for _ in range(STEPS):
            self.step_until(lambda: len(self.asked) < 12)
            self.rng.choices(kinds, weights)[0]()
            for _ in range(self.rng.randrange(1, 5)):
                self.step()

    def step(self) -> None:
        for engine in (self.prefiller, self.decoder):
            if engine.busy():
                engine.step()
        if not (self.prefiller.scheduler.running or self.decoder.scheduler.running):
            time.sleep(0.0005)  # loads run in threads
        self.collect()

    def step_until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + HANG_S
        while not done():
            assert time.monotonic() < end, f"hangs: {self.decoder.under_way()} {self.prefiller.under_way()}"
            self.step()

    def collect(self) -> None:
        for request_id in [r for r in self.asked if r in self.decoder.answers]:
            prompt, output, key = self.asked.pop(request_id)
            answer = self.decoder.answers.pop(request_id)
            context = list(prompt)
            for _ in range(output):
                context.append(next_token(context))
            if answer != context[len(prompt) :]:
                self.wrong.append(f"{request_id}: {answer}")
            self.finished += 1
            if key:
                self.contexts[key] = context[-1200:] if len(context) > 1200 else context

    def ask(self, key: str, params: dict[str, object] | None = None, priority: int = 0) -> list[int]:
        prompt = (self.contexts[key] if key else []) + self.said(self.rng.randrange(1, 120))
        output = self.rng.randrange(1, 12)
        request_id = f"r{uuid.UUID(int=self.rng.getrandbits(128)).hex[:10]}"
        self.decoder.add(request_id, prompt, output, session=key or None, priority=priority, params=params)
        self.asked[request_id] = prompt, output, key
        return prompt

    def turn(self) -> None:
        self.ask(self.rng.choice(CONVERSATIONS))

    def transferred_turn(self) -> None:
        transfer_id = f"t{self.rng.getrandbits(64)}"
        prompt = self.ask(
            self.rng.choice(CONVERSATIONS),
            {
                "do_remote_prefill": True,
                "transfer_id": transfer_id,
                "remote_host": "127.0.0.1",
                "remote_port": self.port,
                "remote_epoch": self.rng.choice([1, 1, 1, 1, 0]),
            },
        )
        if self.rng.random() < 0.9:
            params = {"do_remote_decode": True, "transfer_id": transfer_id}
            self.prefiller.add(f"p{transfer_id}", prompt, 1, params=params)
            self.prefills.append(f"p{transfer_id}")

    def offline(self) -> None:
        self.contexts[""] = self.said(self.rng.randrange(100, 900))
        self.ask("", priority=10)

    def restore(self) -> None:
        """Ask for the prefetch of a conversation, parked or not."""
        self.decoder.prefetch(self.rng.choice(CONVERSATIONS), self.rng.choice([0.01, 5.0]))

    def abort(self) -> None:
        if self.prefills and self.rng.random() < 0.3:
            self.prefiller.abort(self.prefills.pop())
        elif self.asked:
            request_id = self.rng.choice(sorted(self.asked))
            del self.asked[request_id]
            self.decoder.abort(request_id)

    def park(self) -> None:
        self.decoder.kv_state.park(self.rng.choice(CONVERSATIONS))

    def release(self) -> None:
        key = self.rng.choice(CONVERSATIONS)
        self.decoder.kv_state.release(key)
        self.contexts[key] = self.said(100)

    def compact(self) -> None:
        key = self.rng.choice(CONVERSATIONS)
        self.contexts[key] = self.contexts[key][: self.rng.randrange(1, 120)] + self.said(60)

    def corrupt(self) -> None:
        memory = copier_of(self.decoder).memory
        if memory.contents:
            slot = self.rng.choice(sorted(memory.contents))
            damage(memory, slot, self.rng.randrange(memory.rows.shape[1]))

    def reset(self) -> None:
        if not self.decoder.scheduler.running:
            self.decoder.scheduler.reset_prefix_cache()

    def pause(self) -> None:
        time.sleep(self.rng.choice([0.01, 0.06, LEASE_S + 0.05]))

    def settle(self) -> None:
        self.step_until(lambda: not (self.decoder.busy() or self.prefiller.busy()))
        for key in CONVERSATIONS:
            self.decoder.kv_state.release(key)
        time.sleep(LEASE_S + 0.3)
        for engine in (self.decoder, self.prefiller):  # leases and copies end in a step
            engine.add("last", [1, 2, 3], 2)
            engine.run()


def copier_of(engine: SteppedEngine) -> Copier:
    copier: Copier = engine.worker.worker_side("checkpoint").copier
    return copier


@pytest.fixture
def seed() -> int:
    given = os.environ.get("CONSERVE_STORM_SEED")
    return int(given) if given else random.randrange(10**6)


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_storm_of_disturbances_leaks_no_block_and_changes_no_answer(
    seed: int, beside: Mapping[str, Any]
) -> None:
    passes(SimulatedStorm(seed, beside), seed)


@pytest.mark.parametrize(
    "beside", [BESIDE["one group"], BESIDE["windows beside"]], ids=["one group", "windows"]
)
def test_a_storm_with_a_disk_tier_leaks_no_block_and_changes_no_answer(
    seed: int, beside: Mapping[str, Any], tmp_path: Path
) -> None:
    storm = SimulatedStorm(seed, beside, tmp_path)
    passes(storm, seed)
    assert storm.decoder.counts["disk_restored_blocks"], (
        f"nothing came from the disk: CONSERVE_STORM_SEED={seed}"
    )


def passes(storm: SimulatedStorm, seed: int) -> None:
    replay = f"CONSERVE_STORM_SEED={seed}"
    storm.blow()
    storm.settle()
    assert storm.decoder.wrong == [] and storm.prefiller.wrong == [], replay
    assert storm.wrong == [], replay
    assert storm.finished > STEPS / 4, replay
    for engine in (storm.decoder, storm.prefiller):
        assert engine.faults() == [], replay
        free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == engine.blocks - 1, replay
    host = storm.decoder.kv_state.host
    assert host.free == host.capacity and host.free_on_disk == host.disk_capacity, replay
    storm.decoder.close()
    storm.prefiller.close()
