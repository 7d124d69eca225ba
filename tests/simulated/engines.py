"""Engines that keep the product's contract but compute nothing, and the machines on which keepers run them.

An engine answers on HTTP, holds KV by conversation, reports it on its control socket, and hands KV over by
transfer ids. It is not under test; the keeper that starts, watches and adopts it is.
"""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtransfer.control.control_socket import ControlSocketServer, EngineCommand, RecentChanges, Reply
from placement.engines import EngineState, Role
from router.http import Request, Responder, Server
from tests.simulated.loop import SimulatedProcess, VirtualLoop, current
from tests.simulated.network import Network
from workers.keeper.launch import FEED_SOCKET

MODEL = "small"
BLOCK, MAX_CONTEXT = 16, 32_768
TOKEN_S, PROMPT_S = 0.02, 2e-5  # duration of a generated token, and of a prompt's token
TOKENS_PER_EVENT = 5
TRANSFER_S = 3.0  # a decoder waits this long for a prefiller, then computes the prompt itself
IDLE_S = 20.0  # an engine releases a conversation after this much silence


@dataclass
class Fabric:
    """Exported KV that is on its way between engines, by transfer id."""

    computed: dict[str, asyncio.Event] = field(default_factory=dict)


class InOrder(dict[Any, None]):
    """Set whose order does not depend on memory addresses."""

    def add(self, one: Any) -> None:
        self[one] = None

    def discard(self, one: Any) -> None:
        self.pop(one, None)


class Control(ControlSocketServer):
    """The product's control socket, served by the engine's event loop instead of its own thread."""

    def __init__(self, path: Path, engine: "StandInEngine") -> None:
        self._path, self._snapshot, self._commands = path, engine.snapshot, engine.commands
        self._changed, self._stopping = asyncio.Event(), asyncio.Event()
        self._notified, self._keepers = False, InOrder()  # type: ignore[assignment]
        self._opened = asyncio.Event()  # type: ignore[assignment]


class StandInEngine:
    """Engine of one epoch, in a process of its own, which holds and reports KV but computes nothing."""

    def __init__(
        self, name: str, role: Role, epoch: int, kv_tokens: int, directory: Path, fabric: Fabric
    ) -> None:
        self.name, self.role, self.epoch, self.kv_tokens = name, role, epoch, kv_tokens
        self.held: dict[str, int] = {}  # conversation -> tokens
        self.running: dict[str, int] = {}  # conversation -> turns
        self.used_at: dict[str, float] = {}
        self.draining = False
        self.commands = {
            "release": self._release,
            "prefetch": lambda command: Reply(done=command.conversation in self.held),
            "drain": self._drain,
            "check": lambda command: Reply(),
        }
        self._directory, self._fabric = directory, fabric
        self._seq = 0
        self._named = RecentChanges()
        self._control: Control

    async def run(self, host: str, port: int, start_s: float) -> None:
        await asyncio.sleep(start_s)
        self._control = Control(self._directory / FEED_SOCKET, self)
        await Server(self._handle).start(host, port)
        await asyncio.gather(self._control._main(), self._forget())

    def snapshot(self) -> EngineState:
        self._seq += 1
        live = sum(self.held.values())
        self._named.add((), self._seq)
        return EngineState(
            self.name,
            self.epoch,
            self._seq,
            live,
            0,
            0,
            max(0, self.kv_tokens - live),
            sum(self.running.values()),
            0,
            confirmed=self._named.all(),
            named_after=self._named.after,
            draining=self.draining,
            idle_tokens=sum(tokens for key, tokens in self.held.items() if key not in self.running),
        )

    def _release(self, command: EngineCommand) -> Reply:
        had = self.held.pop(command.conversation, None) is not None
        self._control.notify()
        return Reply(done=had)

    def _drain(self, command: EngineCommand) -> Reply:
        self.draining = command.draining
        return Reply(done=True)

    async def _forget(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            for key in [key for key, at in self.used_at.items() if loop.time() - at > IDLE_S]:
                if key not in self.running:
                    del self.used_at[key]
                    self.held.pop(key, None)

    async def _handle(self, request: Request, responder: Responder) -> None:
        if request.path == "/health":
            responder.respond(200, b"")
        elif request.path == "/v1/models":
            responder.respond(200, _json(data=[{"id": MODEL, "max_model_len": MAX_CONTEXT}]), _JSON)
        elif request.path == "/metrics":
            blocks = f'num_gpu_blocks="{self.kv_tokens // BLOCK}",block_size="{BLOCK}"'
            responder.respond(200, b"vllm:cache_config_info{%b} 1\n" % blocks.encode())
        else:
            await self._generate(request, responder)

    async def _generate(self, request: Request, responder: Responder) -> None:
        body = json.loads(await request.body.read())
        key = request.headers.text(b"x-session-id") or ""
        params = body.get("kv_transfer_params") or {}
        prompt = len(json.dumps(body.get("messages") or body.get("prompt") or ""))
        tokens = int(body.get("max_tokens") or 4)
        task = asyncio.current_task()
        assert task is not None
        responder.on_disconnect(task.cancel)
        if params.get("do_remote_decode"):
            await asyncio.sleep(prompt * PROMPT_S)
            self._fabric.computed.setdefault(params["transfer_id"], asyncio.Event()).set()
            usage = {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}
            responder.respond(200, _json(id="p", choices=[], usage=usage), _JSON)
            return
        self.running[key] = self.running.get(key, 0) + 1
        try:
            if params.get("do_remote_prefill"):
                await self._fetch(params["transfer_id"], prompt)
            elif key not in self.held:
                await asyncio.sleep(prompt * PROMPT_S)
            if key:
                self.held[key] = prompt + tokens
                self.used_at[key] = asyncio.get_running_loop().time()
                self._named.add((key,), self._seq + 1)
                self._control.notify()
            await self._answer(body, responder, prompt, tokens)
        finally:
            self.running[key] -= 1
            if not self.running[key]:
                del self.running[key]
            self._control.notify()

    async def _fetch(self, transfer: str, prompt: int) -> None:
        computed = self._fabric.computed.setdefault(transfer, asyncio.Event())
        waiting = asyncio.create_task(computed.wait())
        await asyncio.wait([waiting], timeout=TRANSFER_S)
        waiting.cancel()
        if not computed.is_set():
            await asyncio.sleep(prompt * PROMPT_S)

    async def _answer(self, body: dict[str, Any], responder: Responder, prompt: int, tokens: int) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        if not body.get("stream"):
            await asyncio.sleep(TOKEN_S * tokens)
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "w"}}
            responder.respond(200, _json(id="c", choices=[choice], usage=usage), _JSON)
            return
        responder.start(200, [(b"content-type", b"text/event-stream")])
        for done in range(0, tokens, TOKENS_PER_EVENT):
            now = min(TOKENS_PER_EVENT, tokens - done)
            await asyncio.sleep(TOKEN_S * now)
            end = "stop" if done + now == tokens else None
            choice = {"index": 0, "delta": {"content": "w " * now}, "finish_reason": end}
            responder.write(b"data: " + _json(id="c", choices=[choice]) + b"\n\n")
        responder.write(b"data: " + _json(id="c", choices=[], usage=usage) + b"\n\n")
        responder.finish(b"data: [DONE]\n\n")


_JSON = [(b"content-type", b"application/json")]


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@dataclass
class EngineHost:
    """Host of one engine: stands in for the parts of the operating system that the engine's keeper uses."""

    loop: VirtualLoop
    network: Network
    fabric: Fabric
    name: str
    role: Role
    host: str
    kv_tokens: int
    directory: Path
    process: SimulatedProcess | None = None
    engine: StandInEngine | None = None
    record: "Record | None" = None
    renewed_at: float = 0.0
    lease_s: float = 0.0

    def start(self, epoch: int, ports: tuple[int, ...], fingerprint: str, lease_s: float) -> "Record":
        self.record = Record(epoch, 1000 + epoch, ports, fingerprint)
        self.process = SimulatedProcess(self.loop, f"engine {self.name}", self.host)
        self.engine = StandInEngine(self.name, self.role, epoch, self.kv_tokens, self.directory, self.fabric)
        self.renewed_at, self.lease_s = self.loop.time(), lease_s
        start_s = self.loop.random.uniform(0.3, 2.0)
        self.process.spawn(self.engine.run(self.host, ports[0], start_s))
        self.loop.call_soon(self._watch_lease, self.process, context=self.process.context)
        return self.record

    def kill(self, *, silently: bool = False) -> None:
        """End the engine's process. With `silently` its host is gone too, and nothing answers."""
        if self.process is not None and self.process.alive:
            self.process.crash()
            self.network.process_ended(self.process, silently=silently)

    def _watch_lease(self, process: SimulatedProcess) -> None:
        left_s = self.renewed_at + self.lease_s - self.loop.time()
        if left_s <= 0:
            self.kill()
        else:
            self.loop.call_later(left_s + 0.01, self._watch_lease, process, context=process.context)


@dataclass(frozen=True)
class Record:
    epoch: int
    pid: int
    ports: tuple[int, ...]
    fingerprint: str


MACHINES: dict[Path, EngineHost] = {}  # by the engine's directory


class HostedEngine:
    """Engine's process as its keeper sees it, in place of `workers.keeper.process_lease.LeasedProcess`."""

    def __init__(self, machine: EngineHost, record: Record) -> None:
        self._machine, self.record = machine, record
        self.log = machine.directory / "log"

    @classmethod
    def start(
        cls,
        directory: Path,
        command: object,
        *,
        fingerprint: str,
        epoch: int,
        ports: Any,
        lease_s: float,
        **_: object,
    ) -> "HostedEngine":
        machine = MACHINES[directory]
        return cls(machine, machine.start(epoch, tuple(ports), fingerprint, lease_s))

    @classmethod
    def adopt(cls, directory: Path, fingerprint: str, grace_s: float) -> "HostedEngine | None":
        machine = MACHINES[directory]
        if machine.record is None:
            return None
        found = cls(machine, machine.record)
        if not found.alive() or machine.record.fingerprint != fingerprint:
            found.end(grace_s)
            return None
        found.renew()
        return found

    def alive(self) -> bool:
        machine = self._machine
        return machine.record is self.record and machine.process is not None and machine.process.alive

    def asked_to_end(self) -> bool:
        return False

    def renew(self) -> None:
        self._machine.renewed_at = self._machine.loop.time()

    def memory_bytes(self, enough: int = 0) -> int:
        return 0

    def idle_bytes(self) -> int:
        return 0

    def end(self, grace_s: float) -> bool:
        if self.alive():
            self._machine.kill()
        return True


def last_epoch(directory: Path) -> int:
    record = MACHINES[directory].record
    return record.epoch if record is not None else 0


def free_port(host: str) -> int:
    return current().loop.network.free_port()
