"""Disturb a real prefiller and decoder at random: `python -m tests.kvtransfer.engine.storm --minutes 5`.

A seed draws turns (some through the prefiller, some with transfers that cannot succeed), clients that hang
up, parks, ends, drains and offline work. All of them run concurrently, in rounds; in some rounds an engine is
killed with `kill -9` and started again. Every answer must equal plain vLLM's. After each round the integrity
check of both engines must find nothing, and a restarted engine must hold nothing. At the end all blocks must
be free. `--seed` repeats a storm; `--sabotage` breaks one thing, which the checks must find.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine import sabotage
from tests.kvtransfer.engine.engines import (
    EngineProcess,
    eventually,
    faults_of,
    free_port,
    over_control_socket,
    running,
    socket_path,
    state_of,
)
from tests.kvtransfer.engine.script import (
    BLOCKS,
    CONVERSATIONS,
    OUTPUT,
    PRIORITY,
    TURNS,
    TurnScript,
    recorded,
    said,
)

ROUND_S = 20.0
LEASE_S = 4.0
COUNTED = {
    "preemptions": "vllm:num_preemptions_total",
    "stored blocks": "conserve_kv_stored_blocks_total",
    "restores": "conserve_kv_restores_total",
    "parked": "conserve_kv_parked_total",
    "conversations that left a full host": "conserve_kv_left_host_total",
    "transfers": "conserve_kv_transfers_total",
    "transfers refused": "conserve_kv_transfers_refused_total",
}


@dataclass
class EngineStorm:
    decoder: EngineProcess
    script: TurnScript
    seed: int
    prefiller: EngineProcess | None = None
    suffixes: tuple[str, ...] = ("", "-x", "-y")
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    kills: int = 0

    def blow(self, seconds: float, number: int = 0) -> None:
        """Run one round: each kind of disturbance in a thread with its own seed."""
        end = time.monotonic() + seconds
        kinds = [self._live] * 4 + [self._hang_up, self._command, self._offline]
        if self.prefiller is not None:
            kinds += [self._transferred] * 2
        threads = [
            threading.Thread(target=self._until, args=(end, kind, random.Random(f"{self.seed}.{number}.{n}")))
            for n, kind in enumerate(kinds)
        ]
        for thread in threads:
            thread.start()
        if self.prefiller is not None:
            self._perhaps_kill(random.Random(f"{self.seed}.{number}"), number, seconds)
        for thread in threads:
            thread.join(seconds + 300)
            if thread.is_alive():
                self.wrong.append(f"round {number}: a request hangs")
                return

    def settle(self) -> None:
        """Check after a round that both engines are idle and report no fault."""
        time.sleep(0.3)
        for engine in self.engines():
            over_control_socket(engine, lambda client: client.drain(False))
            engine.ask([9, 9], 1)  # copies and leases end in a step
            if not eventually(lambda e=engine: idle(e), 120):  # type: ignore[misc]
                self.wrong.append(f"{name_of(engine)} does not come to rest: {state_of(engine)}")
            self.wrong += [f"{name_of(engine)}: {fault}" for fault in faults_of(engine)]
            counts = engine.metrics()
            if found := counts.get("conserve_kv_faults_total", 0):
                self.wrong.append(f"{name_of(engine)} counted {found:.0f} faults")

    def count(self, engine: EngineProcess) -> None:
        """Record an engine's counters before it is killed, and at the end."""
        counts = engine.metrics()
        self.done.update({name: int(counts.get(metric, 0)) for name, metric in COUNTED.items()})

    def give_back(self) -> None:
        """End every conversation, and check that nothing is held any more."""
        for suffix in self.suffixes:
            for conversation in range(CONVERSATIONS):
                key = f"c{conversation}{suffix}"
                over_control_socket(self.decoder, lambda client, key=key: client.release(key))  # type: ignore[misc]
        time.sleep(LEASE_S if self.prefiller else 0)
        self.settle()
        for engine in self.engines():
            if not eventually(lambda e=engine: not held(e), 60):  # type: ignore[misc]
                self.wrong.append(f"{name_of(engine)} still holds {held(engine)} tokens")

    # Disturbances

    def _until(self, end: float, kind: Callable[[random.Random], None], rng: random.Random) -> None:
        while time.monotonic() < end:
            kills = self.kills
            try:
                kind(rng)
            except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
                if kills == self.kills and not kills % 2:  # no engine was killed meanwhile
                    self.wrong.append(repr(error))
                    return
                self.done["cut off by a kill"] += 1
                while self.kills % 2 and time.monotonic() < end:
                    time.sleep(0.1)

    def _perhaps_kill(self, rng: random.Random, number: int, seconds: float) -> None:
        if number % 3 != 1:
            return
        victim = rng.choice([self.decoder, self.decoder, self.prefiller])
        assert victim is not None and victim.connector is not None
        time.sleep(rng.uniform(0.2, 0.7) * seconds)
        self.count(victim)
        self.kills += 1  # an odd number: an engine is down
        victim.kill()
        self.done["kills"] += 1
        victim.connector = replace(victim.connector, epoch=victim.connector.epoch + 1)
        victim.start()
        if not eventually(lambda: not held(victim), 20):
            self.wrong.append(f"{name_of(victim)} begins with {held(victim)} tokens")
        self.kills += 1

    def _pick(self, rng: random.Random) -> tuple[int, int, str]:
        return rng.randrange(CONVERSATIONS), rng.randrange(TURNS), rng.choice(self.suffixes)

    def _live(self, rng: random.Random, params: dict[str, object] | None = None) -> None:
        conversation, turn, suffix = self._pick(rng)
        prompt = self.script.prompts[conversation][turn]
        answer = self.decoder.ask(prompt, OUTPUT, params, session=f"c{conversation}{suffix}")
        self.done["turns"] += 1
        if answer.tokens != self.script.answers[conversation][turn]:
            self.wrong.append(f"c{conversation}{suffix}, turn {turn}: {answer.tokens}")
        time.sleep(rng.random() * 0.2)

    def _transferred(self, rng: random.Random) -> None:
        """Run both legs of a turn, sometimes with a wrong epoch or without the prefill leg."""
        assert self.prefiller is not None and self.prefiller.connector is not None
        target, transfer_id = self.prefiller.connector, uuid.UUID(int=rng.getrandbits(128)).hex
        conversation, turn, suffix = self._pick(rng)
        prompt = self.script.prompts[conversation][turn]
        params = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_host": "127.0.0.1",
            "remote_port": target.port,
            "remote_epoch": target.epoch - (rng.random() < 0.1),
        }
        leg = self.decoder.ask_later(prompt, OUTPUT, params, f"c{conversation}{suffix}")
        failed: Exception | None = None
        if rng.random() < 0.9:
            try:
                self.prefiller.ask(prompt, 1, {"do_remote_decode": True, "transfer_id": transfer_id})
            except (OSError, RuntimeError) as error:  # the decoder answers without the prefill leg
                failed = error
        if leg.result().tokens != self.script.answers[conversation][turn]:
            self.wrong.append(f"c{conversation}{suffix}, turn {turn}, transferred: {leg.result().tokens}")
        self.done["transferred turns"] += 1
        if failed is not None:
            raise failed
        time.sleep(rng.random())

    def _hang_up(self, rng: random.Random) -> None:
        conversation, turn, suffix = self._pick(rng)
        prompt = self.script.prompts[conversation][turn] + said(rng, rng.randrange(1, 300))
        body = {"model": "m", "prompt": prompt, "max_tokens": 200, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Session-ID": f"c{conversation}{suffix}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.decoder.http, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        time.sleep(rng.random() * 0.6)
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        self.done["aborts"] += 1

    def _command(self, rng: random.Random) -> None:
        conversation, _, suffix = self._pick(rng)
        key, dice = f"c{conversation}{suffix}", rng.random()
        if dice < 0.9:
            over_control_socket(self.decoder, lambda client: client.release(key))
            self.done["ends"] += 1
        else:
            over_control_socket(self.decoder, lambda client: client.drain(True))
            time.sleep(rng.random())
            over_control_socket(self.decoder, lambda client: client.drain(False))
            self.done["drains"] += 1
        time.sleep(rng.random() * 0.6)

    def _offline(self, rng: random.Random) -> None:
        self.decoder.ask(said(rng, rng.randrange(300, 2500)), rng.randrange(1, 60), priority=10)
        self.done["offline requests"] += 1

    def engines(self) -> list[EngineProcess]:
        return [self.decoder] + ([self.prefiller] if self.prefiller else [])


def name_of(engine: EngineProcess) -> str:
    assert engine.connector is not None
    return engine.connector.engine


def idle(engine: EngineProcess) -> bool:
    state = state_of(engine)
    return not (state.running or state.waiting or state.offline_running or state.offline_waiting)


def held(engine: EngineProcess) -> int:
    state = state_of(engine)
    on_host = state.host_used_tokens + state.disk_used_tokens
    return state.live_tokens + state.parked_tokens + state.offline_tokens + on_host


@contextlib.contextmanager
def engines(plugins: tuple[str, ...]) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Start a prefiller, and a decoder with KV for a third of the conversations and a host that fills up."""
    prefiller = ConnectorConfig(
        engine="prefiller", epoch=1, port=free_port(), lease_s=LEASE_S, control_socket=socket_path()
    )
    decoder = ConnectorConfig(
        engine="decoder",
        epoch=1,
        host_kv_gib=0.06,
        park_after_s=0.5,
        control_socket=socket_path(),
        timeout_s=4,
        plugins=plugins,
    )
    with running(
        EngineProcess(prefiller, blocks=200, batched_tokens=512),
        EngineProcess(decoder, blocks=BLOCKS, batched_tokens=512, arguments=PRIORITY),
    ) as (first, second):
        yield first, second


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--sabotage", choices=sorted(sabotage.PLUGINS), help="break one thing: it must be found"
    )
    arguments = parser.parse_args()
    again = f"--seed {arguments.seed}"
    print(f"storm {again}", flush=True)
    with running(EngineProcess(blocks=BLOCKS, batched_tokens=512, arguments=PRIORITY)) as (plain,):
        script = recorded(plain)
    os.environ.setdefault(sabotage.VARIABLE, os.devnull + ".none")
    plugins = (sabotage.PLUGINS[arguments.sabotage],) if arguments.sabotage else ()
    with engines(plugins) as (prefiller, decoder):
        storm = EngineStorm(decoder, script, arguments.seed, prefiller)
        end, number = time.monotonic() + arguments.minutes * 60, 0
        while time.monotonic() < end and not storm.wrong:
            storm.blow(min(ROUND_S, end - time.monotonic()), number)
            storm.settle()
            number += 1
            print(f"round {number}: {storm.done['turns']} turns, {len(storm.wrong)} wrong", flush=True)
        if not storm.wrong:
            storm.give_back()
        for engine in storm.engines():
            storm.count(engine)
    for name, count in sorted(storm.done.items()):
        print(f"{count:7} {name}")
    for wrong in storm.wrong[:20]:
        print("WRONG", wrong)
    print(f"{len(storm.wrong)} wrong; again: {again}")
    return bool(storm.wrong)


if __name__ == "__main__":
    sys.exit(main())
