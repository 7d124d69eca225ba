"""No request reads KV that was not computed for it, whatever is aborted, on vLLM without a model."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.v1.request import RequestStatus

from kvtransfer.plugins import Match, Plugin, SchedulerSide
from tests.workers.coserving.model_free import BLOCK, ModelFreeEngine, expected
from tests.workers.coserving.overlapped import OverlappedEngine
from workers.engine.coserving import rollback

# In the last two, clients hang up while their steps are in flight; other requests read the KV of these steps.
STORMS = [(ModelFreeEngine, 0), (ModelFreeEngine, 1), (OverlappedEngine, 59), (OverlappedEngine, 78)]
# Tokens that the layers of each KV cache group attend to.
WINDOWS = {"full": (0,), "mixed": (0, 70), "windows only": (70,)}


def calmed(engine: ModelFreeEngine, asked: dict[str, tuple[list[int], int]]) -> ModelFreeEngine:
    """Run without aborts until all requests are answered; a wrong answer counts as wrong KV."""
    for _ in range(400):
        if not engine.scheduler.requests:
            break
        engine.step(0.0)
    for key, got in engine.outputs.items():
        if got != expected(*asked[key]):
            engine.lies.append(f"{key} answered {got}, not {expected(*asked[key])}")
    return engine


def storm(
    model: Path,
    left_out: rollback.Step | None,
    seed: int,
    rounds: int = 200,
    windows: tuple[int, ...] = (0,),
    kind: type[ModelFreeEngine] = ModelFreeEngine,
) -> ModelFreeEngine:
    rng = random.Random(seed)
    engine = kind(model, left_out, seed, windows=windows)
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(rounds):
        if number % 8 == 0 and number < rounds - 60:
            prefix = [rng.randint(32, 120) for _ in range(rng.choice((40, 70, 150)))]
            for index in range(rng.randint(1, 4)):  # siblings are admitted together, and share blocks
                key, prompt = (
                    f"{number}-{index}",
                    prefix + [rng.randint(32, 120) for _ in range(rng.randint(1, 40))],
                )
                asked[key] = prompt, rng.randint(1, 6)
                engine.ask(key, *asked[key], priority=rng.randint(0, 1))
        engine.step(abort_share=0.5 if number < rounds - 60 else 0.0, hang_up_share=0.02)
    return calmed(engine, asked)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize(("kind", "seed"), STORMS)
def test_no_request_reads_kv_that_was_not_computed(
    small_model: Path, kind: type[ModelFreeEngine], windows: tuple[int, ...], seed: int
) -> None:
    engine = storm(small_model, None, seed, windows=windows, kind=kind)
    assert engine.aborts > 25
    assert engine.hung_up > 0
    assert engine.lies == []
    assert not engine.scheduler.requests


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_a_request_reuses_blocks_that_a_disconnected_one_is_still_computing(
    small_model: Path, windows: tuple[int, ...]
) -> None:
    engine = OverlappedEngine(small_model, windows=windows)
    prompt = [33 + number % 80 for number in range(150)]
    engine.ask("gone", prompt, 2, priority=0)
    engine.step(abort_share=0.0)
    assert engine.scheduler.requests["gone"].num_in_flight_tokens == 150
    engine.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    engine.outputs.pop("gone")
    engine.ask("next", prompt, 2, priority=0)
    engine.step(abort_share=0.0)
    assert engine.scheduler.requests["next"].num_in_flight_tokens == 150 - 128  # `gone` computes the rest
    assert calmed(engine, {"next": (prompt, 2)}).lies == []


@pytest.mark.parametrize("left_out", [rollback.rewind_computed, rollback.evict_written])
def test_some_request_reads_uncomputed_kv_if_a_step_of_the_rollback_is_left_out(
    small_model: Path, left_out: rollback.Step
) -> None:
    assert any(_lied(small_model, left_out, seed) for seed in range(3))


def _lied(model: Path, left_out: rollback.Step, seed: int) -> bool:
    try:
        return bool(storm(model, left_out, seed).lies)
    except AssertionError:  # vLLM's own checks stop it first
        return True


def lies_after_the_owner_left(model: Path, left_out: rollback.Step | None) -> list[str]:
    """Abort two requests that share a prefix, disconnect the one that computes it, and return wrong reads."""
    engine = ModelFreeEngine(model, left_out, 0)
    prefix = [33 + number % 80 for number in range(128)]
    engine.ask("owner", prefix + [40] * 3, 2, priority=1)
    engine.ask("sharer", prefix + [41] * 5, 2, priority=1)
    engine.step(abort_share=1.0)
    assert engine.aborts == 1
    engine.scheduler.finish_requests("owner", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        engine.step(abort_share=0.0)
    return engine.lies


def test_a_request_that_adopted_blocks_of_an_aborted_iteration_computes_them_itself(
    small_model: Path,
) -> None:
    assert lies_after_the_owner_left(small_model, None) == []
    assert lies_after_the_owner_left(small_model, rollback.truncate_sharers) != []


def lies_behind_a_window(model: Path, left_out: rollback.Step | None, windows: tuple[int, ...]) -> list[str]:
    """Admit a request that reuses ten blocks, of which an abort undoes four; return the wrong reads."""
    engine = ModelFreeEngine(model, left_out, 0, windows=windows)
    prompt = [33 + number % 80 for number in range(320)]
    engine.ask("owner", prompt, 2, priority=1)
    engine.step(abort_share=0.0)
    engine.ask("sharer", prompt + [40] * 5, 2, priority=1)
    engine.step(abort_share=1.0)
    assert engine.aborts == 1 and engine.scheduler.requests["sharer"].num_computed_tokens < 320
    for _ in range(8):
        engine.step(abort_share=0.0)
    assert not engine.scheduler.requests
    return engine.lies


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_a_request_that_loses_a_part_of_its_window_recomputes_the_window(
    small_model: Path, windows: tuple[int, ...]
) -> None:
    assert lies_behind_a_window(small_model, None, windows) == []


class LoadsOneBlock(SchedulerSide):
    """Connector that has one more block of the prompt of the request `sharer`."""

    def match(self, request: Any, computed_tokens: int) -> Match | None:
        return Match(BLOCK, background=True) if request.request_id == "sharer" else None


class Loads(Plugin):
    name = "loads"
    scheduler = LoadsOneBlock


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_a_request_waiting_for_kv_recomputes_adopted_blocks_that_were_undone(
    small_model: Path, windows: tuple[int, ...]
) -> None:
    engine = ModelFreeEngine(small_model, windows=windows, plugins=(f"{__name__}:Loads",))
    prompt = [33 + number % 80 for number in range(320)]
    engine.ask("owner", prompt, 2, priority=1)
    engine.step(abort_share=0.0)
    engine.ask("sharer", prompt + [40] * (BLOCK + 5), 2, priority=1)
    engine.step(abort_share=1.0)
    assert engine.aborts == 1 and engine.scheduler.requests["sharer"].num_computed_tokens <= 192
    engine.step(abort_share=0.0, loaded=frozenset({"sharer"}))
    for _ in range(8):
        engine.step(abort_share=0.0)
    assert engine.lies == [] and not engine.scheduler.requests


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_a_request_waiting_for_kv_starts_anew_if_all_adopted_blocks_were_undone(
    small_model: Path, windows: tuple[int, ...]
) -> None:
    engine = ModelFreeEngine(small_model, windows=windows, plugins=(f"{__name__}:Loads",))
    prompt = [33 + number % 80 for number in range(128)]
    engine.ask("owner", prompt + [40] * 3, 2, priority=1)
    engine.ask("sharer", prompt + [41] * (BLOCK + 5), 2, priority=1)
    engine.step(abort_share=1.0)
    sharer = engine.scheduler.requests["sharer"]
    assert engine.aborts == 1 and sharer.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(abort_share=0.0, loaded=frozenset({"sharer"}))
    for _ in range(8):
        engine.step(abort_share=0.0)
    assert engine.lies == [] and not engine.scheduler.requests


def hits_after_an_abort(model: Path, left_out: rollback.Step | None) -> int:
    """Return how many tokens of a prompt are cached after it was aborted and computed again."""
    engine = ModelFreeEngine(model, left_out, 0)
    prompt = [33 + number % 80 for number in range(150)]
    engine.ask("first", prompt, 2, priority=1)
    engine.step(abort_share=1.0)
    assert engine.aborts == 1
    for _ in range(3):
        engine.step(abort_share=0.0)
    engine.ask("second", prompt, 1, priority=1)
    return int(engine.scheduler.cached_tokens(engine.scheduler.requests["second"]))


def test_blocks_computed_again_after_an_abort_enter_the_prefix_cache(small_model: Path) -> None:
    assert hits_after_an_abort(small_model, None) == 128
    assert hits_after_an_abort(small_model, rollback.rewind_registered) < 128


@pytest.mark.parametrize("left_out", [None, rollback.restore_prefill_marks])
def test_a_prompt_whose_last_chunk_was_aborted_counts_as_prefilling(
    small_model: Path, left_out: rollback.Step | None
) -> None:
    engine = ModelFreeEngine(small_model, left_out, 0)
    engine.ask("a", [40] * 100, 2, priority=1)
    engine.step(abort_share=1.0)
    request = engine.scheduler.requests["a"]
    assert request.is_prefill_chunk == (left_out is None)
