"""Grammars are compiled in forks of a separate process; an expensive grammar delays only its owner."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from prometheus_client import REGISTRY
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from deploy.small_model import make_model
from workers import processes
from workers.engine.grammars.checks import GrammarChecks
from workers.engine.grammars.compile_process import TITLE, failure, new_address
from workers.engine.grammars.config import ADDRESS, GrammarBudget

# A regex of 19 KB for which xgrammar takes minutes and gigabytes.
MANY_REPETITIONS = "((a{1,999}b){1,999}c){1,999}|" + "|".join(
    f"([a-z]{{1,{2000 + number}}}[0-9])" for number in range(900)
)
pytestmark = pytest.mark.slow  # starts processes that import vLLM
BUDGET = GrammarBudget(cpu_s=2.0, memory_mib=128, wait_s=60.0)


def schema(name: str) -> dict[str, Any]:
    return {"json": {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}}


def repetitions(number: int) -> dict[str, Any]:
    return {"regex": f"{MANY_REPETITIONS}|{number}"}


def count(outcome: str) -> float:
    return REGISTRY.get_sample_value("conserve_grammar_checks_total", {"outcome": outcome}) or 0.0


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in the kind of event loop that vLLM's server uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


class CompileProcess:
    """Compiling process for one engine configuration, started like the replacement of a killed process."""

    def __init__(self, config: Any) -> None:
        self.config, self.address = config, new_address()
        argv = [sys.executable, "-m", "workers.engine.grammars.compile_process"]
        env = {**os.environ, ADDRESS: self.address, **BUDGET.to_environment()}
        self.process = psutil.Process(subprocess.Popen(argv, env=env).pid)

    def listens(self) -> bool:
        return f"@{self.address}" in Path("/proc/net/unix").read_text()

    def forks(self) -> list[psutil.Process]:
        return [one for one in self.process.children() if one.status() != psutil.STATUS_ZOMBIE]

    async def check(self, checks: GrammarChecks, constraint: dict[str, Any], owner: str = "bob") -> Any:
        return await checks.check(self.config, constraint, owner)


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompileProcess]:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import EngineArgs

    model = tmp_path_factory.mktemp("model")
    make_model(model)
    structured = StructuredOutputsConfig(backend="auto")
    args = EngineArgs(
        model=str(model), dtype="float32", max_model_len=1024, structured_outputs_config=structured
    )
    found = CompileProcess(args.create_engine_config())
    limit = time.monotonic() + 180
    try:
        while not found.listens():
            assert time.monotonic() < limit, "the process does not start"
            time.sleep(0.2)
        yield found
    finally:
        found.process.kill()


@pytest.mark.timeout(300)
def test_each_kind_of_grammar_is_compiled_as_vllm_does(compiling: CompileProcess) -> None:
    async def main() -> None:
        checks = GrammarChecks(compiling.address, BUDGET)
        kinds = (schema("a"), {"regex": "[abc]{4}"}, {"json_object": True}, {"grammar": 'root ::= "a"'})
        for constraint in kinds:
            assert (await compiling.check(checks, constraint))["_backend"] == "xgrammar"
        choice = await compiling.check(checks, {"choice": ["a", "b"]})
        assert choice["choice"] is None and choice["grammar"] == 'root ::= "a" | "b"'
        multiple = {"json": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}}}
        assert (await compiling.check(checks, multiple))["_backend"] == "guidance"
        with pytest.raises(VLLMValidationError):
            await compiling.check(checks, {"regex": "(((("})

    run(main())


@pytest.mark.timeout(300)
def test_a_grammar_over_its_budget_is_stopped_and_remembered(compiling: CompileProcess) -> None:
    async def main() -> None:
        checks, before = GrammarChecks(compiling.address, BUDGET), count("over_budget")
        peak, limits = 0, dict[str, str]()
        asked = asyncio.create_task(compiling.check(checks, repetitions(0)))
        while not asked.done():
            await asyncio.sleep(0.02)
            for fork in compiling.forks():
                peak = max(peak, _own_bytes(fork))
                limits |= _limits(fork)
        with pytest.raises(VLLMValidationError, match=r"more than 2 s of computing or 128 MiB"):
            await asked
        assert peak < 2 * BUDGET.memory_mib << 20
        assert limits["Max cpu time"] == "2" and limits["Max data size"].isdigit(), limits
        assert count("over_budget") == before + 1
        limit = time.monotonic() + 5
        while compiling.forks():
            assert time.monotonic() < limit, "the fork still runs"
            await asyncio.sleep(0.05)
        known, began = count("known"), time.monotonic()
        with pytest.raises(VLLMValidationError):
            await compiling.check(checks, repetitions(0))
        assert time.monotonic() - began < BUDGET.cpu_s / 2 and count("known") == known + 1

    run(main())


@pytest.mark.timeout(300)
def test_one_owners_grammars_do_not_keep_another_owner_waiting(compiling: CompileProcess) -> None:
    async def main() -> None:
        checks = GrammarChecks(compiling.address, BUDGET)
        attack = [asyncio.create_task(compiling.check(checks, repetitions(n), "eve")) for n in range(1, 3)]
        limit, counts = time.monotonic() + 60, list[int]()
        while not compiling.forks():
            assert time.monotonic() < limit, "nothing is compiled"
            await asyncio.sleep(0.02)
        for _ in range(10):
            counts.append(len(compiling.forks()))
            await asyncio.sleep(0.05)
        assert max(counts) == 1, "one compilation per owner at a time"
        await compiling.check(checks, schema("of_bob"), "bob")
        assert not all(one.done() for one in attack)
        ended = await asyncio.gather(*attack, return_exceptions=True)
        assert {type(one) for one in ended} == {VLLMValidationError}

    run(main())


@pytest.mark.timeout(300)
def test_a_schema_that_many_owners_send_together_is_not_compiled_once_per_owner(
    compiling: CompileProcess,
) -> None:
    async def main() -> None:
        checks, before = GrammarChecks(compiling.address, BUDGET), count("compiled")
        asked = (compiling.check(checks, schema("shared"), f"owner-{n}") for n in range(20))
        answers = await asyncio.gather(*asked)
        assert count("compiled") <= before + BUDGET.at_once
        assert all(answer == answers[0] for answer in answers)

    run(main())


@pytest.mark.timeout(300)
def test_an_owner_does_not_wait_for_the_same_grammar_in_the_queue_of_another(
    compiling: CompileProcess,
) -> None:
    async def main() -> None:
        checks, shared = GrammarChecks(compiling.address, BUDGET), schema("of_both")
        slow = asyncio.create_task(compiling.check(checks, repetitions(20), "eve"))
        await asyncio.sleep(0)
        queued = asyncio.create_task(compiling.check(checks, shared, "eve"))
        await asyncio.sleep(0.05)
        answer = await compiling.check(checks, shared, "bob")
        assert not slow.done() and not queued.done()
        before = count("compiled")
        assert await queued == answer and count("compiled") == before
        with pytest.raises(VLLMValidationError):
            await slow

    run(main())


@pytest.mark.timeout(300)
def test_an_owner_with_too_many_grammars_is_told_to_retry(compiling: CompileProcess) -> None:
    async def main() -> None:
        checks = GrammarChecks(compiling.address, GrammarBudget(2.0, 128, wait_s=0.3))
        first = asyncio.create_task(compiling.check(checks, repetitions(10), "eve"))
        await asyncio.sleep(0.05)
        with pytest.raises(GracefulHTTPError) as refused:
            await compiling.check(checks, schema("late"), "eve")
        assert refused.value.http_status == 429
        with pytest.raises(VLLMValidationError):
            await first

    run(main())


@pytest.mark.timeout(400)
def test_a_killed_compiling_process_is_started_again(compiling: CompileProcess) -> None:
    async def main() -> None:
        checks = GrammarChecks(compiling.address, BUDGET)
        await compiling.check(checks, schema("before"))
        compiling.process.kill()
        compiling.process.wait(10)
        assert (await compiling.check(checks, schema("after")))["_backend"] == "xgrammar"
        alive = [one for one in psutil.Process().children() if processes.alive(one.pid)]
        [again] = [one for one in alive if one.cmdline()[:1] == [TITLE]]
        compiling.process = again

    run(main())


def test_a_grammar_budget_is_unchanged_after_passing_through_the_environment() -> None:
    assert GrammarBudget.from_environment(BUDGET.to_environment()) == BUDGET


def test_a_grammar_whose_compilation_lacks_memory_is_over_budget_but_not_invalid() -> None:
    parsing = VLLMValidationError("Failed to transform regex into a grammar: std::bad_alloc")
    assert failure(parsing) == failure(MemoryError()) == {"over_budget": True}
    assert failure(VLLMValidationError("no")) == {"invalid": "no"}


def _own_bytes(process: psutil.Process) -> int:
    """Return the private bytes of a process, or 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))


def _limits(process: psutil.Process) -> dict[str, str]:
    """Return the resource limits of a process by name, or an empty result if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {line[:26].strip(): line[26:].split()[0] for line in lines}
