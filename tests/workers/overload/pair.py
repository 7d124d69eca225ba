"""Two engines, each in a process of its own, that may share their layers; told what to do over a pipe.

An engine steps whenever it has something to do, as vLLM's own loop does.
"""

import contextlib
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from kvtransfer.feed import FeedCommand, Reply
from tests.kvtransfer.engine.in_process import ENVIRONMENT, EngineHere
from workers.overload.config import DROPPING_SCHEDULER, DROPPING_WORKER, OVERLOAD_PLUGIN
from workers.overload.memory import LayerWeights
from workers.overload.plugin import NAME
from workers.overload.split import SplitLimits, SplitModel

BLOCKS = 41
LIMIT_S = 240.0
MEET_S = 10.0
ORDER_S = 60.0
Request = tuple[str, list[int], int]


class SplitChild:
    """In the engine's process."""

    def __init__(self, model: Path) -> None:
        connector = ConnectorConfig(
            transfer=False, layer_hooks=False, plugins=(OVERLOAD_PLUGIN,), host_kv_gib=0.05
        )
        self.engine = EngineHere(
            model,
            connector,
            blocks=BLOCKS,
            scheduler_cls=DROPPING_SCHEDULER,
            worker_cls=DROPPING_WORKER,
            max_model_len=1024,
            max_num_batched_tokens=128,
            max_num_seqs=16,
        )
        self.names: dict[str, str] = {}
        self.split: SplitModel = self.engine.worker_side(NAME).split
        self.limit(ORDER_S)

    @property
    def busy(self) -> bool:
        return bool(self.engine.scheduler.has_requests())

    def add(self, requests: list[Request]) -> None:
        for name, prompt, output in requests:
            self.names[self.engine.add(prompt, output)] = name

    def answers(self) -> dict[str, list[int]]:
        """Those since the last time."""
        taken, self.engine.answers = self.engine.answers, {}
        return {self.names[request_id]: tokens for request_id, tokens in taken.items()}

    def command(self, command: FeedCommand) -> Reply:
        handler: Callable[[FeedCommand], Reply] = getattr(self.engine.side(NAME), command.command)
        return handler(command)

    def state(self) -> dict[str, Any]:
        scheduler, residence = self.engine.scheduler, self.engine.connector.residence
        pool = scheduler.kv_cache_manager.block_pool
        requests = scheduler.requests.values()
        return {
            "epoch": residence.split.epoch if residence.split else 0,
            "pending": self.engine.side(NAME).pending,
            "blocks": pool.num_gpu_blocks,
            "highest": max((b.block_id for b in pool.blocks if b.ref_cnt), default=0),
            "running": len(scheduler.running),
            "left": len(requests),
            "generated": sum(request.num_output_tokens for request in requests),
            "preemptions": sum(request.num_preemptions for request in requests),
            "passes": self.split.tally.passes,
            "served": self.split.tally.served,
            "parameters": self.split.weights.held_bytes(),
        }

    def forget(self) -> bool:
        """The prefix cache."""
        return bool(self.engine.scheduler.reset_prefix_cache())

    def faults(self) -> list[str]:
        return self.engine.faults()

    def limit(self, order_s: float) -> None:
        self.split.limits = SplitLimits(meet_s=MEET_S, order_s=order_s)

    def broken(self, name: str) -> None:
        """What this engine does is wrong in one way from now on; "": right again."""
        from tests.workers.overload import broken

        self.split.__class__ = getattr(broken, name, SplitModel)
        self.split.weights.__class__ = broken.SkipsALayer if name == "WithAPartOfTheWeights" else LayerWeights

    def late_message(self, address: str, epoch: int) -> str:
        """KV of a split that is over, sent to the peer as if it had been on its way for long."""
        import torch

        from workers.overload.channel import Message, PeerAsk, PeerConnection
        from workers.overload.errors import SplitOver

        peer = PeerConnection(address, ENVIRONMENT[SECRET_VARIABLE].encode(), 10.0)
        rows, member = list(range(1, BLOCKS)), self.split.member
        assert member is not None
        try:
            for layer in member.gone:
                noise = torch.randn_like(self.split.kv.read(member.kept[0], rows))
                peer.ask(Message(PeerAsk.PUT, epoch, {"layer": layer, "rows": rows}, [noise]))
        except SplitOver:
            return "refused"
        finally:
            peer.close()
        return "taken"


def serve(pipe: Connection, model: Path) -> None:
    child = SplitChild(model)
    pipe.send(child.split.facts().address)
    while True:
        if pipe.poll(0 if child.busy else 0.01):
            try:
                name, arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(child, name)(*arguments))
        elif child.busy:
            child.engine.step()


class SplitEngine:
    """The test's side of one."""

    def __init__(self, model: Path) -> None:
        self.address = ""  # of its peer server, once it is ready
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, model), daemon=True
        )
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        assert self.pipe.poll(LIMIT_S * 2), "it does not start"
        self.address = self.pipe.recv()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.pipe.send((name, arguments))
            assert self.pipe.poll(LIMIT_S), f"no answer to {name}"
            return self.pipe.recv()

        return call

    def until(self, true: Callable[[dict[str, Any]], bool], limit_s: float = LIMIT_S) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while True:
            state: dict[str, Any] = self.state()
            if true(state):
                return state
            assert time.monotonic() < end, state
            time.sleep(0.02)


@dataclass
class SplitPair:
    first: SplitEngine
    second: SplitEngine
    epoch: int = 0

    @property
    def engines(self) -> tuple[SplitEngine, SplitEngine]:
        return self.first, self.second

    def drop(self) -> None:
        """And wait until it has happened, or has not."""
        self.tell(self.first, 0)
        self.tell(self.second, 1, again=False)
        for engine in self.engines:
            assert engine.until(lambda state: not state["pending"])["epoch"] == self.epoch

    def tell(self, engine: SplitEngine, part: int, again: bool = True) -> None:
        self.epoch += again
        peer = self.second if part == 0 else self.first
        reply = engine.command(FeedCommand("drop", epoch=self.epoch, peer=peer.address, part=part))
        assert reply.done, reply

    def restore(self) -> None:
        self.tell_restore()
        for engine in self.engines:
            assert engine.until(lambda state: not state["pending"])["epoch"] == 0

    def tell_restore(self) -> None:
        for engine in self.engines:
            reply = engine.command(FeedCommand("restore", epoch=self.epoch))
            assert reply.done, reply

    def add(self, requests: list[Request]) -> None:
        self.first.add(requests[::2])
        self.second.add(requests[1::2])

    def finish(self) -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {}
        for engine in self.engines:
            engine.until(lambda state: not state["left"])
            answers.update(engine.answers())
        return answers

    def fresh(self) -> None:
        """Nothing broken, nothing split, nothing cached."""
        for engine in self.engines:
            engine.broken("")
        if self.first.state()["epoch"]:
            self.restore()
        self.finish()
        for engine in self.engines:
            engine.until(lambda state: not state["left"])
            assert engine.forget()


@contextlib.contextmanager
def pair(model: Path) -> Iterator[SplitPair]:
    engines = SplitEngine(model), SplitEngine(model)
    try:
        for engine in engines:
            engine.ready()
        yield SplitPair(*engines)
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.join(20)


def requests(seed: int, count: int = 16, output: int = 60, common: int = 0) -> list[Request]:
    """The first `common` tokens of all are the same."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(common)]
    prompts = [
        shared + [rng.randrange(256) for _ in range(rng.choice([40, 90, 200, 330]))] for _ in range(count)
    ]
    return [(f"{seed}.{number}", prompt, output) for number, prompt in enumerate(prompts)]
