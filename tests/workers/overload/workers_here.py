"""Workers and scheduler sides without an engine, with only the parts of a model that a split uses."""

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from workers.engine.overload.orders import DropOrder, RestoreOrder, SplitEvent, SplitReport, WorkerFacts
from workers.engine.overload.pages.cpu_pages import CpuPageDriver
from workers.engine.overload.pages.layer_memory import LayerWeights, ReservedKv
from workers.engine.overload.pages.physical_memory import PhysicalMemory
from workers.engine.overload.plugin import OverloadScheduler
from workers.engine.overload.split.membership import DeviceLock, EngineMemory, PeerSettings, SplitLimits
from workers.engine.overload.split.split_model import SplitModel

LAYERS, BLOCKS, WIDTH, BLOCK_TOKENS, PAGE = 20, 16, 64, 16, 4096
LIMITS = SplitLimits(meet_s=5.0, answer_s=5.0, order_s=1.0)
SECRET = b"a secret only for these tests"
USED = list(range(1, BLOCKS))


class Layer(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.self_attn = SimpleNamespace(attn=SimpleNamespace(layer_name=name))

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        raise NotImplementedError


class Qwen3ForCausalLM:
    """The parts of a model that a split uses."""

    def __init__(self) -> None:
        layers = [Layer(str(number)) for number in range(LAYERS)]
        self.model = SimpleNamespace(layers=layers, embed_input_ids=lambda ids: ids, norm=lambda *seen: seen)


class WorkerHere:
    """Worker between two iterations, with memory and a peer server but without a model runner of vLLM."""

    def __init__(self) -> None:
        model = Qwen3ForCausalLM()
        attention = SimpleNamespace(bind_kv_cache=lambda tensor: None)
        names = [str(number) for number in range(LAYERS)]
        runner = SimpleNamespace(
            get_model=lambda: model,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
            cache_config=SimpleNamespace(block_size=BLOCK_TOKENS),
            model_config=SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=torch.float32),
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, attention)),
            kv_caches=[],
            requests={},
            input_batch=SimpleNamespace(
                block_table=[SimpleNamespace(block_table=SimpleNamespace(np=None))], req_id_to_index={}
            ),
            device=torch.device("cpu"),
        )
        self.memory = PhysicalMemory(CpuPageDriver(PAGE))
        weights = LayerWeights(model.model.layers, self.memory)
        first = {name: torch.empty(BLOCKS, 2, 32) for name in names}
        sizes = [weights.layer_bytes(layer) for layer in range(LAYERS)]
        there_is = EngineMemory(BLOCKS, first["0"][0].nbytes, sizes, PAGE)
        kv = ReservedKv(first, there_is.most_rows(), self.memory)
        self.device = DeviceLock()
        line = PeerSettings("127.0.0.1", SECRET)
        self.model = SplitModel(runner, kv, weights, BLOCKS, self.device, line)
        self.split = self.model.split
        self.split.limits = LIMITS
        for layer in range(LAYERS):
            kv.write(layer, USED, torch.randn(len(USED), 2, 32))
        self.had, self.parameters = self.kv(), weights.mapped_bytes()
        self._layers = model.model.layers
        self._had = [layer.linear.weight.detach().clone() for layer in self._layers]

    def kv(self) -> list[torch.Tensor]:
        return [self.split.kv.read(layer, USED).clone() for layer in range(LAYERS)]

    @property
    def has_all(self) -> bool:
        return all(map(torch.equal, self.kv(), self.had))

    @property
    def has_its_parameters(self) -> bool:
        """Return whether a worker has its parameters; only a worker with its whole model may be asked."""
        return all(
            torch.equal(layer.linear.weight, had) for layer, had in zip(self._layers, self._had, strict=True)
        )

    @property
    def whole(self) -> bool:
        return not self.model.is_split and self.split.weights.mapped_bytes() == self.parameters

    def step(self, what: Callable[[SplitModel], None]) -> SplitReport:
        with self.device:
            what(self.model)
        report = self.model.take_report()
        assert report is not None
        return report


Group = tuple[WorkerHere, ...]


def at_once(*steps: Callable[[], SplitReport]) -> tuple[list[SplitEvent], float]:
    """Run the workers' orders in parallel; return how each ended, and how many seconds the first one took."""
    ended: dict[int, tuple[SplitReport, float]] = {}

    def run(number: int, step: Callable[[], SplitReport]) -> None:
        began = time.monotonic()
        ended[number] = step(), time.monotonic() - began

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [ended[number][0].event for number in sorted(ended)], ended[0][1]


def drops(*workers: WorkerHere, epoch: int = 1) -> list[Callable[[], SplitReport]]:
    """Return, for each worker, a call that carries out an order to drop its part of the layers."""
    members = tuple(worker.model.facts().address for worker in workers)
    return [dropping(worker, DropOrder(epoch, members, part, USED)) for part, worker in enumerate(workers)]


def dropping(worker: WorkerHere, order: DropOrder) -> Callable[[], SplitReport]:
    return lambda: worker.step(lambda split: split.drop(order))


def restores(workers: Sequence[WorkerHere], epoch: int = 1) -> list[Callable[[], SplitReport]]:
    return [restoring(worker, epoch) for worker in workers]


def restoring(worker: WorkerHere, epoch: int = 1) -> Callable[[], SplitReport]:
    return lambda: worker.step(lambda model: model.restore(RestoreOrder(epoch, {}, USED)))


def split(group: Group) -> None:
    ended, _ = at_once(*drops(*group))
    assert ended == [SplitEvent.SPLIT] * len(group)


def a_batch(block: int = 1, slot: int = 1, *, length: int = 1, longest: int = 1, starts: Any = (0, 1)) -> Any:
    """Return the inputs of an iteration with one token of one request."""
    one, lens = torch.zeros(1, dtype=torch.int64), torch.tensor([length])
    tensors = [
        one,
        torch.zeros(1, 64),
        torch.tensor(starts),
        lens,
        torch.tensor([[block]]),
        torch.tensor([slot]),
    ]
    return {"part": 1, "sizes": [1, 1, longest]}, tensors


def engine_with_a_pool() -> Any:
    queue = SimpleNamespace(prepend_n=lambda blocks: None)
    pool = SimpleNamespace(num_gpu_blocks=BLOCKS, blocks=[None] * BLOCKS, free_block_queue=queue)
    sizes = SimpleNamespace(num_gpu_blocks=BLOCKS), SimpleNamespace(num_blocks=BLOCKS)
    manager = SimpleNamespace(block_pool=pool)
    return SimpleNamespace(kv_cache_manager=manager, cache_config=sizes[0], kv_cache_config=sizes[1])


def scheduler_side(
    address: str, layers: int, clock: Callable[[], float] = lambda: 0.0, kv_state: Any = None
) -> OverloadScheduler:
    """Return the scheduler side of an engine that can drop layers; `kv_state` replaces the stand-in."""
    facts = WorkerFacts(address, layers, 1_000, 256, 64)
    kv_state = kv_state or SimpleNamespace(
        clock=clock, split=None, kv_io_suspended=False, lock=threading.Lock(), conversations=None
    )
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK_TOKENS))
    context: Any = SimpleNamespace(kv_state=kv_state, commands={}, vllm_config=config)
    side = OverloadScheduler(context)
    side.bind(engine_with_a_pool().kv_cache_manager)
    side.after_step(None, SplitReport(SplitEvent.READY, 0, BLOCKS, facts=facts))
    return side
