"""A storm: many random aborts and preemptions. Every output must equal that of an undisturbed run.

    python -m tests.workers.coserving.storm --model DIR [--aborts 200] [--preemptions 100] [--overlap]

Requests are online and offline, share prefixes, are computed in chunks, and use structured output, stop
strings, logprobs, seeded sampling with n > 1 and clients that hang up. The model is in float32; outputs are
compared token by token, and their logprobs within a tolerance.
"""

import argparse
import asyncio
import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import cpu_overlap
from benchmarks.harness.output import command, write_json
from benchmarks.harness.standalone_engine import StandaloneEngine, StandaloneShape, coserving_engine, on_cuda
from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import LatencyModel
from workers.engine.coserving import safepoint as page
from workers.engine.coserving.config import CoServingConfig
from workers.engine.coserving.safepoint import Flag

# Roughly the small model on two cores, so that policies decide by realistic times.
SMALL_MODEL = LatencyModel(per_token=3e-4, per_attended=2e-8, per_context=1e-7, constant=1.5e-2)
CALM = "calm"  # the run without aborts


@dataclass(frozen=True)
class StormRequest:
    name: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    priority: int
    hang_up_after_s: float | None = None
    together: str = ""  # requests with the same word here arrive at the same moment
    queue_weight: float = 0.0  # prompts with a lower weight wait behind it


# An abort changes which tokens share a matrix product, and so the order in which its sums are rounded. In
# float32 that moves a logprob by up to 4e-6 (measured); wrong KV moves it by tenths.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class StormAnswer:
    choices: list[tuple[tuple[int, ...], str, str | None]]  # token ids, text, finish reason
    logprobs: list[dict[int, float]]  # by token id; the positions of the choices, then those of the prompt

    @classmethod
    def of(cls, output: Any) -> "StormAnswer":
        choices = sorted(output.outputs, key=lambda choice: choice.index)
        positions = [position for choice in choices for position in choice.logprobs or ()]
        positions += [position for position in output.prompt_logprobs or () if position]  # the first has none
        return cls(
            [(tuple(choice.token_ids), choice.text, choice.finish_reason) for choice in choices],
            [{token: entry.logprob for token, entry in position.items()} for position in positions],
        )

    def difference(self, expected: "StormAnswer") -> str:
        """Return how an answer differs from the expected one, or an empty string if it does not."""
        if self.choices != expected.choices:
            return f"choices {self.choices} instead of {expected.choices}"
        if len(self.logprobs) != len(expected.logprobs):
            return f"{len(self.logprobs)} positions with logprobs instead of {len(expected.logprobs)}"
        for position, (got, right) in enumerate(zip(self.logprobs, expected.logprobs, strict=True)):
            far = (abs(got[token] - right[token]) > LOGPROB_TOLERANCE for token in got.keys() & right.keys())
            if got.keys() != right.keys() or any(far):
                return f"logprobs {got} instead of {right} at position {position}"
        return ""


@dataclass
class StormResult:
    aborts: int
    preemptions: int
    compared: int
    wrong: list[str]  # the name of each answer, and what differs
    stalled: list[str]
    seconds: float
    overlapped: int = 0  # iterations that were scheduled while the one before ran
    abort_layers: list[int] = field(default_factory=list)
    signal_to_abort_s: list[float] = field(default_factory=list)
    check_gap_s: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.stalled


def asks(seed: int, count: int) -> list[StormRequest]:
    rng = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randint(32, 120) for _ in range(length))

    prefixes = [tokens(rng.randint(60, 300)) for _ in range(3)]
    made = []
    for index in range(count):
        offline = index % 3 != 0
        prompt = prefixes[index % 3] + tokens(rng.randint(8, 260) if offline else rng.randint(4, 60))
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.randint(8, 28), "ignore_eos": True}
        match index % 7:
            case 1:
                params["logprobs"] = 3
            case 2:
                params |= {"temperature": 1.0, "seed": index, "n": 2}
            case 3:
                params |= {"stop": ["a", "e", "1"], "min_tokens": 3}
            case 4:
                params |= {"structured_outputs": {"regex": "[a-c]{4,40}z"}, "ignore_eos": False}
            case 5:
                params["prompt_logprobs"] = 1
        queue_weight = 8.0 if index % 6 == 0 else 0.0
        made.append(
            StormRequest(f"{seed}-{index}", prompt, params, priority=int(offline), queue_weight=queue_weight)
        )
        if index % 10 == 9:
            made.append(
                StormRequest(
                    f"{seed}-{index}-left",
                    prompt + tokens(90),
                    dict(params),
                    int(offline),
                    rng.uniform(0.05, 0.8),
                )
            )
    # Short prompts with a new common prefix arrive together and are admitted in one step. They share blocks
    # that this step has yet to compute.
    for group in range(6):
        prefix, params = tokens(70), {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
        for index in range(4):
            name = f"{seed}-siblings{group}-{index}"
            made.append(
                StormRequest(name, prefix + tokens(6), params, group % 2, together=f"siblings{group}")
            )
    return made


async def ask(engine: StandaloneEngine, one: StormRequest, run: str, stall_s: float) -> StormAnswer | None:
    """Return the answer, or None if the client hung up; raise TimeoutError if the request stalls."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    params = dict(one.params) | {"output_kind": RequestOutputKind.FINAL_ONLY}
    # In the calm run targets are loose and weights equal, so that no arrival raises the flag.
    params["extra_args"] = {"slo_ttft_ms": 1e6} if run == CALM else {"queue_weight": one.queue_weight}
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    final: Any = None

    async def consume() -> None:
        nonlocal final
        async for output in engine.llm.generate(
            {"prompt_token_ids": list(one.prompt)},
            SamplingParams(**params),
            f"{run}-{one.name}",
            priority=one.priority,
        ):
            final = output

    if one.hang_up_after_s is not None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(consume(), one.hang_up_after_s)
        return None
    await asyncio.wait_for(consume(), stall_s)
    return StormAnswer.of(final)


class Raiser(threading.Thread):
    """Thread that raises the flag of armed iterations at random moments, as arrivals do."""

    def __init__(self, flag: Flag, seed: int, probability: float, longest_s: float) -> None:
        super().__init__(daemon=True)
        self._flag = flag
        self._rng = random.Random(seed)
        self._probability = probability
        self._longest_s = longest_s
        self.stop = threading.Event()

    def run(self) -> None:
        seen = 0
        while not self.stop.wait(0.0005):
            epoch = self._flag.fields[page.RUNNING]
            if not epoch or epoch == seen:
                continue
            seen = epoch
            if self._rng.random() < self._probability:
                time.sleep(self._rng.uniform(0, self._longest_s))
                self._flag.raise_for(epoch)


async def run_all(
    engine: StandaloneEngine, many: list[StormRequest], run: str, spread_s: float, stall_s: float = 120.0
) -> dict[str, Any]:
    async def later(one: StormRequest) -> tuple[str, Any]:
        moment = random.Random(f"{run}/{one.together or one.name}").uniform(0, spread_s)
        await asyncio.sleep(0.0 if one.priority and not one.together else moment)
        try:
            return one.name, await ask(engine, one, run, stall_s)
        except TimeoutError:
            return one.name, "stalled"

    return dict(await asyncio.gather(*(later(one) for one in many)))


async def storm(
    engine: StandaloneEngine,
    aborts: int,
    preemptions: int,
    seed: int = 0,
    count: int = 42,
    limit_s: float = 900.0,
    stall_s: float = 120.0,
    until_wrong: bool = False,
) -> StormResult:
    """Send the same requests in rounds until there were `aborts` aborts and `preemptions` preemptions."""
    started = time.monotonic()
    many = asks(seed, count)
    earlier = len(engine.iterations())
    expected = await run_all(engine, [one for one in many if one.hang_up_after_s is None], CALM, 1.0)
    if any(record.aborted for record in engine.iterations()[earlier:]):
        raise RuntimeError("the undisturbed run was disturbed: it had aborts")
    await engine.empty()
    before = len(engine.iterations())
    result = StormResult(0, 0, 0, [], [], 0.0)
    raiser = Raiser(engine.flag, seed, probability=0.45, longest_s=0.08)
    raiser.start()
    try:
        for number in range(1000):
            got = await run_all(engine, many, f"storm{number}", 6.0, stall_s)
            for name, output in got.items():
                if output is None:
                    continue
                result.compared += 1
                if output == "stalled":
                    result.stalled.append(f"storm{number}/{name}")
                elif difference := output.difference(expected[name]):
                    result.wrong.append(f"storm{number}/{name}: {difference}")
            done = engine.iterations()[before:]
            result.aborts = sum(record.aborted for record in done)
            result.preemptions = sum(record.preempted for record in done)
            enough = result.aborts >= aborts and result.preemptions >= preemptions
            if (
                enough
                or result.stalled
                or (until_wrong and result.wrong)
                or time.monotonic() - started > limit_s
            ):
                break
            await engine.empty()
    finally:
        raiser.stop.set()
        raiser.join(5)
    result.overlapped = sum(record.overlapped for record in engine.iterations()[before:])
    ended = [record for record in engine.iterations()[before:] if record.aborted]
    result.abort_layers = [record.abort_layer for record in ended]
    result.signal_to_abort_s = [record.signal_to_abort_s for record in ended]
    result.check_gap_s = [record.check_gap_s for record in ended]
    result.seconds = time.monotonic() - started
    return result


def storm_shape(model: Path, overlaps: bool = False, **more: Any) -> StandaloneShape:
    """Return engine options with little memory and small iterations.

    Prompts therefore take several chunks, and online requests have to preempt. `overlaps` asks for
    asynchronous scheduling on CPUs (`cpu_overlap.overlapping`).
    """
    # vLLM requires this share of a GPU to be free; the blocks below need little of it.
    arguments: dict[str, Any] = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30}
    if not on_cuda():
        # vLLM's choice for CPUs, which `fork_engine_on_cpu` changes unless it is named: the worker computes
        # while the scheduler plans.
        arguments = {"distributed_executor_backend": "mp"}
        arguments |= {"worker_cls": cpu_overlap.WORKER} if overlaps else {}
    small: dict[str, Any] = {
        "blocks": 65,
        "max_tokens": 192,
        "max_running": 12,
        "max_context": 1024,
        "arguments": arguments,
    }
    return StandaloneShape(model, **small | more)


def storm_config() -> CoServingConfig:
    slo = TurnTargets(ttft_s=0.3, tbt_s=0.15)
    return CoServingConfig(ServingSettings("conserve", slo, ageing_s=5.0), SMALL_MODEL, profiled=True)


async def _main(arguments: argparse.Namespace) -> StormResult:
    binding = "|".join(str(core) for core in range(arguments.ranks))  # one core per rank
    environment = {"VLLM_CPU_OMP_THREADS_BIND": binding} if arguments.ranks > 1 else {}
    shape = storm_shape(
        arguments.model,
        compiled=arguments.compiled,
        ranks=arguments.ranks,
        host_kv_gib=arguments.host_kv_gib,
        environment=environment,
        overlaps=arguments.overlap,
    )
    with cpu_overlap.overlapping() if arguments.overlap else contextlib.nullcontext():
        async with coserving_engine(shape, storm_config()) as engine:
            return await storm(
                engine, arguments.aborts, arguments.preemptions, arguments.seed, limit_s=arguments.limit_s
            )


def main() -> None:
    parser = command(__doc__, quick="10 aborts, 5 preemptions")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--aborts", type=int, default=200)
    parser.add_argument("--preemptions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel")
    parser.add_argument("--overlap", action="store_true", help="asynchronous scheduling, also on CPUs")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--host-kv-gib", type=float, default=0.0, help="checkpoint offline KV on the host")
    parser.add_argument("--limit-s", type=float, default=900.0)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.aborts, arguments.preemptions = 10, 5
    result = asyncio.run(_main(arguments))
    waits = sorted(result.signal_to_abort_s)
    print(
        f"{result.aborts} aborts, {result.preemptions} preemptions, "
        f"{result.overlapped} iterations overlapped, {result.compared} outputs compared, "
        f"{len(result.wrong)} wrong, {len(result.stalled)} stalled, {result.seconds:.0f} s"
    )
    if waits:
        print(
            f"signal to abort: median {waits[len(waits) // 2] * 1e3:.1f} ms, longest {waits[-1] * 1e3:.1f} ms"
        )
    for name in (*result.wrong, *result.stalled)[:20]:
        print("  ", name)
    figures = {
        "aborts": result.aborts,
        "preemptions": result.preemptions,
        "overlapped": result.overlapped,
        "outputs_compared": result.compared,
        "outputs_wrong": len(result.wrong),
        "outputs_stalled": len(result.stalled),
        "signal_to_abort_s": result.signal_to_abort_s,
        "check_gap_s": result.check_gap_s,
        "abort_layers": result.abort_layers,
    }
    write_json(arguments.json, figures)
    raise SystemExit(0 if result.ok else 1)


if __name__ == "__main__":
    main()
