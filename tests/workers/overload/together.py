"""Engines that can share their layers, each in its own process and controlled over a pipe.

An engine runs an iteration whenever it has something to do, as vLLM's own loop does.
"""

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvtransfer.compat.block_cache import notify_of_arrivals
from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from kvtransfer.control.control_socket import EngineCommand, Reply
from tests.kvtransfer.engine.in_process import ENVIRONMENT, EngineHere
from tests.support.warm_process import warm_context
from workers.engine.coserving.config import PROMPT_SCHEDULER, SAFEPOINT_PLUGIN, SCHEDULER_CLASS, WORKER_CLASS
from workers.engine.coserving.safepoint import ABORTS, RUNNING, Flag
from workers.engine.overload.config import OVERLOAD_PLUGIN
from workers.engine.overload.plugin import NAME
from workers.engine.overload.split.membership import SplitLimits
from workers.engine.overload.split.split_model import SplitModel

BLOCKS = 41
LIMIT_S = 240.0
MEET_S = 10.0
ORDER_S = 60.0
Request = tuple[str, list[int], int]


class SplitChild:
    """Child process with one engine, which carries out the commands that the test sends."""

    def __init__(self, model: Path, blocks: int, batched_tokens: int, coserves: bool) -> None:
        self.highest = 0  # number of the highest block held since `forget`
        self.armed_shared = 0  # armed steps while layers were shared, or a drop or restore ran
        connector = ConnectorConfig(
            transfer=False,
            layer_hooks=coserves,
            safepoint=f"conserve-test-{uuid.uuid4().hex[:8]}" if coserves else "",
            plugins=(SAFEPOINT_PLUGIN, OVERLOAD_PLUGIN) if coserves else (OVERLOAD_PLUGIN,),
            host_kv_gib=0.05,
        )
        self.engine = EngineHere(
            model,
            connector,
            blocks=blocks,
            scheduler_cls=SCHEDULER_CLASS if coserves else PROMPT_SCHEDULER,
            worker_cls=WORKER_CLASS,
            max_model_len=1024,
            max_num_batched_tokens=batched_tokens,
            max_num_seqs=16,
        )
        self.names: dict[str, str] = {}
        self.hold_after: int | None = None  # generated tokens after which it waits for an order
        self.interrupts, self.arrivals = False, 0
        self.flag: Flag | None = self.engine.side("safepoint").flag if coserves else None
        if self.flag is not None:
            notify_of_arrivals(self._arrived)  # in addition to the engine's own callback
            threading.Thread(target=self._interrupt, args=(self.flag,), daemon=True).start()
        self.model: SplitModel = self.engine.worker_side(NAME).model
        self.split = self.model.split
        self.limit(ORDER_S)

    @property
    def busy(self) -> bool:
        return bool(self.engine.scheduler.has_requests()) and not self.holds

    @property
    def holds(self) -> bool:
        return self.hold_after is not None and self.generated > self.hold_after

    @property
    def generated(self) -> int:
        """Return how many tokens the requests that have not ended have generated."""
        return sum(request.num_output_tokens for request in self.engine.scheduler.requests.values())

    def hold(self, after: int | None) -> None:
        """Run no iteration once more than `after` tokens are generated, until an order arrives."""
        self.hold_after = after

    def add(self, requests: list[Request], priority: int = 0) -> None:
        for name, prompt, output in requests:
            self.names[self.engine.add(prompt, output, priority=priority)] = name

    def _interrupt(self, flag: Flag) -> None:
        """Abort about a third of the abortable iterations at random, as arrivals do."""
        rng, last = random.Random(5), 0
        while True:
            time.sleep(0.001)
            epoch = flag.fields[RUNNING]
            if epoch != last and self.interrupts and rng.random() < 0.3:
                flag.raise_for(epoch)
            last = epoch

    def _arrived(self, request: Any) -> None:
        self.arrivals += 1

    def interrupt(self, on: bool) -> None:
        self.interrupts = on

    def answers(self) -> dict[str, list[int]]:
        """Return the answers that ended since the last call."""
        taken, self.engine.answers = self.engine.answers, {}
        return {self.names[request_id]: tokens for request_id, tokens in taken.items()}

    def command(self, command: EngineCommand) -> Reply:
        self.hold_after = None
        handler: Callable[[EngineCommand], Reply] = getattr(self.engine.side(NAME).inbox, command.command)
        return handler(command)

    def state(self) -> dict[str, Any]:
        scheduler, kv_state = self.engine.scheduler, self.engine.connector.kv_state
        pool = scheduler.kv_cache_manager.block_pool
        requests = scheduler.requests.values()
        return {
            "epoch": kv_state.split.epoch if kv_state.split else 0,
            "pending": self.engine.side(NAME).pending,
            "blocks": pool.num_gpu_blocks,
            "highest": self.highest,
            "running": len(scheduler.running),
            "left": len(requests),
            "computed": self.engine.computed,
            "generated": self.generated,
            "holds": self.holds,
            "preemptions": sum(request.num_preemptions for request in requests),
            "passes": self.model.passes.counts.own,
            "served": self.model.passes.counts.served,
            "parameters": self.split.weights.mapped_bytes(),
            "aborts": self.flag.fields[ABORTS] if self.flag is not None else 0,
            "armed_shared": self.armed_shared,
            "arrivals": self.arrivals,
            "observed": self.engine.scheduler.latency.observed,
            "policy": type(self.engine.scheduler.policy).__name__,
        }

    def forget(self) -> bool:
        """Empty the prefix cache."""
        self.highest = 0
        return bool(self.engine.scheduler.reset_prefix_cache())

    def faults(self) -> list[str]:
        return self.engine.faults()

    def step(self) -> None:
        self.engine.step()
        if self.flag is not None and self.engine.connector.kv_state.kv_io_suspended:
            self.armed_shared += bool(self.engine.side("safepoint").armed)
        blocks = self.engine.scheduler.kv_cache_manager.block_pool.blocks
        held = (block.block_id for block in blocks if block.ref_cnt)
        self.highest = max(self.highest, *held, 0)

    def limit(self, order_s: float) -> None:
        self.split.limits = SplitLimits(meet_s=MEET_S, order_s=order_s)

    def broken(self, name: str) -> None:
        """Break this engine in the named way; an empty name mends it."""
        from tests.workers.overload import broken

        broken.break_with(self.model, name)

    def late_message(self, part: int, epoch: int) -> str:
        """Send a peer KV of an ended split, as if it had been delayed."""
        import torch

        from workers.engine.overload.split.peer_link import Message, MessageKind, PeerConnection, SplitEnded

        member = self.split.member
        assert member is not None
        rows = list(range(1, BLOCKS))
        peer = PeerConnection(member.members[part], ENVIRONMENT[SECRET_VARIABLE].encode(), 10.0)
        try:
            for layer in member.parts[part]:
                noise = torch.randn_like(self.split.kv.read(member.kept[0], rows))
                values = {"layer": layer, "rows": rows, "part": member.part}
                peer.request(Message(MessageKind.PUT, epoch, values, [noise]))
        except SplitEnded:
            return "refused"
        finally:
            peer.close()
        return "taken"


def serve(pipe: Connection, *arguments: Any) -> None:
    child = SplitChild(*arguments)
    pipe.send(child.model.facts().address)
    while True:
        if pipe.poll(0 if child.busy else 0.01):
            try:
                name, given = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(child, name)(*given))
        elif child.busy:
            child.step()


class SplitEngine:
    """Handle with which a test controls one engine."""

    def __init__(self, model: Path, blocks: int, batched_tokens: int, coserves: bool) -> None:
        self.address = ""  # of its peer server, known once the engine is ready
        self.pipe, theirs = warm_context().Pipe()
        self.process = warm_context().Process(
            target=serve, args=(theirs, model, blocks, batched_tokens, coserves), daemon=True
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
class SplitTogether:
    engines: tuple[SplitEngine, ...]  # in the order of their parts
    epoch: int = 0

    @property
    def first(self) -> SplitEngine:
        return self.engines[0]

    @property
    def second(self) -> SplitEngine:
        return self.engines[1]

    def drop(self) -> None:
        """Order a split and wait for its result."""
        for part, engine in enumerate(self.engines):
            self.tell(engine, part, again=part == 0)
        for engine in self.engines:
            assert engine.until(lambda state: not state["pending"])["epoch"] == self.epoch

    def tell(self, engine: SplitEngine, part: int, again: bool = True) -> None:
        self.epoch += again
        members = tuple(one.address for one in self.engines)
        reply = engine.command(EngineCommand("drop", epoch=self.epoch, members=members, part=part))
        assert reply.done, reply

    def restore(self) -> None:
        self.tell_restore()
        for engine in self.engines:
            assert engine.until(lambda state: not state["pending"])["epoch"] == 0

    def tell_restore(self) -> None:
        for engine in self.engines:
            reply = engine.command(EngineCommand("restore", epoch=self.epoch))
            assert reply.done, reply

    def add(self, requests: list[Request], priority: int = 0) -> None:
        for number, engine in enumerate(self.engines):
            engine.add(self.own(requests, number), priority)

    def own(self, requests: list[Request], number: int) -> list[Request]:
        """Return the part of `requests` that the engine with this number serves."""
        return requests[number :: len(self.engines)]

    def finish(self) -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {}
        for engine in self.engines:
            engine.until(lambda state: not state["left"])
            answers.update(engine.answers())
        return answers

    def fresh(self) -> None:
        """Reset all engines: nothing is broken, split or cached."""
        for engine in self.engines:
            engine.broken("")
            engine.hold(None)
        if self.first.state()["epoch"]:
            self.restore()
        self.finish()
        for engine in self.engines:
            engine.until(lambda state: not state["left"])
            assert engine.forget()

    def right(self, asked: list[Request]) -> dict[str, list[int]]:
        """Return the answers of engines with whole models to these requests."""
        self.fresh()
        self.add(asked)
        return self.finish()

    def storm(
        self, asked: list[Request], offline: Sequence[Request] = ()
    ) -> tuple[dict[str, list[int]], int]:
        """Drop and restore at random while requests run; return their answers and the number of drops."""
        self.fresh()
        rng = random.Random(11)
        self.add(list(offline), priority=10)
        self.add(asked)
        changes = 0
        while any(engine.state()["left"] > 2 for engine in self.engines):
            self.drop()
            time.sleep(rng.uniform(0, 0.5))
            self.restore()
            time.sleep(rng.uniform(0, 0.3))
            changes += 1
        return self.finish(), changes

    def begin(self, asked: list[Request], priority: int = 0) -> None:
        """Let every engine generate a few tokens and hold, so that requests do not end before an order."""
        for engine in self.engines:
            engine.hold(20)
        self.add(asked, priority)
        for engine in self.engines:
            engine.until(lambda state: state["holds"])

    def split_in_flight(self, asked: list[Request], generated: int = 150) -> None:
        self.begin(asked)
        self.drop()
        for engine in self.engines:  # an engine that began early may have no request left
            engine.until(lambda state: state["generated"] > generated or not state["running"])


@contextlib.contextmanager
def together(
    model: Path, count: int = 2, blocks: int = BLOCKS, batched_tokens: int = 128, coserves: bool = False
) -> Iterator[SplitTogether]:
    engines = tuple(SplitEngine(model, blocks, batched_tokens, coserves) for _ in range(count))
    try:
        for engine in engines:
            engine.ready()
        yield SplitTogether(engines)
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.join(20)


def requests(seed: int, count: int = 16, output: int = 60, common: int = 0) -> list[Request]:
    """Return requests whose prompts have the first `common` tokens in common."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(common)]
    prompts = [
        shared + [rng.randrange(256) for _ in range(rng.choice([40, 90, 200, 330]))] for _ in range(count)
    ]
    return [(f"{seed}.{number}", prompt, output) for number, prompt in enumerate(prompts)]
