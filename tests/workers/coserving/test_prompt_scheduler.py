"""vLLM's real scheduler serves prompts in the policy's order; tests count the tokens of iterations.

The latency model drives the clock, so that results do not depend on the machine.
"""

from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from placement.scheduling.interface import TurnTargets
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prefill_curve import PrefillCurve, curve_of
from placement.scheduling.prompt_order import PromptSharing
from tests.traces.simulator.conftest import profile, work
from tests.workers.coserving.model_free import ModelFreeEngine, expected
from traces.simulator.engine import EventQueue, SimulatedEngine
from traces.simulator.kv import LiveConversation, Pressure
from workers.engine.coserving.config import PROMPT_SCHEDULER

MODEL = LatencyModel(per_token=1e-3, per_attended=0.0, per_context=0.0, constant=0.02)
TBT = TurnTargets(5.0, 0.1)  # 80 tokens beside decoding requests, less the margin


def words(count: int, seed: int = 0) -> list[int]:
    return [33 + (seed + 7 * number) % 80 for number in range(count)]


class Stepped(ModelFreeEngine):
    """Engine whose iterations run one by one, or overlap by one as with asynchronous scheduling."""

    def __init__(
        self, model: Path, overlapping: bool = False, believed: LatencyModel = MODEL, **more: Any
    ) -> None:
        self.now = 100.0
        super().__init__(
            model,
            slo=TBT,
            scheduler=PROMPT_SCHEDULER,
            latency=believed,
            overlapping=overlapping,
            clock=lambda: self.now,
            **more,
        )
        self.steps: list[dict[str, int]] = []
        self.first: dict[str, int] = {}  # by request: number of the step that made its first token
        self._depth = 2 if overlapping else 1
        self._under_way: deque[Any] = deque()

    def advance(self) -> bool:
        """Start an iteration if there is work, and end the oldest if as many run as may overlap."""
        done = self.scheduler.schedule()
        if done.num_scheduled_tokens:
            self.steps.append(dict(done.num_scheduled_tokens))
            self._under_way.append((done, self.rows_of(done)))
        if self._under_way and (len(self._under_way) >= self._depth or not done.num_scheduled_tokens):
            step, rows = self._under_way.popleft()
            self.now += MODEL.seconds(BatchWork.of((row.count, row.end - row.count) for row in rows))
            self.deliver(step, rows, self.forward(rows))
            for key, made in self.outputs.items():
                if made:
                    self.first.setdefault(key, len(self.steps) - len(self._under_way))
        return bool(self.scheduler.requests)

    def finish(self, asked: dict[str, tuple[list[int], int]]) -> None:
        for _ in range(600):
            if not self.advance():
                break
        assert self.lies == []
        assert self.outputs == {key: expected(*one) for key, one in asked.items()}


def seconds_of(step: dict[str, int]) -> float:
    return MODEL.seconds(BatchWork(sum(step.values())))


BOTH = pytest.mark.parametrize("overlapping", [False, True], ids=["synchronous", "asynchronous"])


def start(engine: Stepped, asked: dict[str, tuple[list[int], int]], priority: int = 0) -> None:
    for key, (prompt, output) in asked.items():
        engine.ask(key, prompt, output, priority)


@BOTH
def test_running_turns_keep_their_target_beside_a_long_prompt(small_model: Path, overlapping: bool) -> None:
    engine = Stepped(small_model, overlapping)
    turns = {f"turn{n}": (words(20, n), 30) for n in range(3)}
    start(engine, turns)
    while len(engine.first) < 3:
        engine.advance()
    before = len(engine.steps)
    long_one = {"long": (words(400), 2)}
    start(engine, long_one)
    engine.finish(turns | long_one)
    beside = [step for step in engine.steps[before:] if "long" in step]
    chunks = [step["long"] for step in beside if step["long"] > 1]
    assert sum(chunks) >= 399
    assert len(chunks) >= 5, "it is cut"
    assert all(seconds_of(step) <= 0.1 for step in beside)
    assert all(turn in step for step in beside[:5] for turn in turns), "every turn has its token in each"


@BOTH
def test_the_shortest_prompt_goes_first_but_a_long_one_is_not_starved(
    small_model: Path, overlapping: bool
) -> None:
    engine = Stepped(small_model, overlapping)
    asked = {"long": (words(600, 1), 1), "short": (words(180, 2), 1), "shorter": (words(40, 3), 1)}
    start(engine, asked)
    later = {f"late{n}": (words(60, 4 + n), 1) for n in range(120)}
    for key, one in later.items():  # one comes with every step: without ageing the long one would never end
        engine.ask(key, *one, priority=0)
        engine.advance()
    engine.finish(asked | later)
    first = engine.first
    assert first["shorter"] < first["short"] < first["long"] < first["late119"]


@BOTH
def test_offline_prompts_come_last_while_offline_decoding_continues(
    small_model: Path, overlapping: bool
) -> None:
    engine = Stepped(small_model, overlapping)
    offline, online = {"off": (words(30, 9), 20)}, {"a": (words(300, 1), 4)}
    start(engine, offline, priority=1)
    while not engine.first:
        engine.advance()
    start(engine, {"off2": (words(40, 5), 2)}, priority=1)
    start(engine, online)
    engine.finish(offline | online | {"off2": (words(40, 5), 2)})
    assert engine.first["a"] <= engine.first["off2"], "it fills what the last piece of a prompt leaves"
    assert all("off" in step for step in engine.steps if "a" in step and step["a"] > 1)


@BOTH
def test_a_prompt_that_lacks_memory_does_not_stop_running_prompts(
    small_model: Path, overlapping: bool
) -> None:
    """Two prompts hold 40 of 47 blocks in the end. A prompt of 10 blocks fits only when one has ended."""
    engine = Stepped(small_model, overlapping)
    asked = {f"big{n}": (words(630, n), 4) for n in range(2)}
    start(engine, asked)
    for _ in range(8):
        engine.advance()
    asked["small"] = words(310, 5), 3
    engine.ask("small", *asked["small"], priority=0)
    engine.finish(asked)


def test_decoding_offline_work_takes_no_tokens_from_prompts(small_model: Path) -> None:
    """A prompt gets the time that decoding leaves, as the placer's estimates assume."""
    engine = Stepped(small_model)
    engine.ask("offline", words(20), 60, priority=1)
    while not engine.first:
        engine.advance()
    start(engine, {"long": (words(600, 1), 2)})
    engine.advance()
    assert engine.scheduler.plugin("report").snapshot().prompt_share == 1.0


def test_reports_have_the_waiting_prompt_tokens_and_the_speed_and_time_share_of_prompts(
    small_model: Path,
) -> None:
    engine = Stepped(small_model)
    report = engine.scheduler.plugin("report")
    assert report.snapshot().prompt_tokens_per_s == 0
    start(engine, {"turn": (words(20), 30)})
    while not engine.first:
        engine.advance()
    start(engine, {"long": (words(600, 1), 2)})
    assert report.snapshot().waiting_prompt_tokens == 600
    engine.advance()
    assert 0 < report.snapshot().waiting_prompt_tokens < 600
    for _ in range(3):
        engine.advance()
    state = report.snapshot()
    assert 500 < engine.scheduler.plugin("report").speed.rate.tokens_per_s < 1000
    assert abs(state.prompt_share - (1 - seconds_of({"turn": 1}) / 0.1)) < 0.01


ARRIVALS = {  # seconds, prompt, output
    "first": (0.0, 60, 40),
    "long": (0.3, 600, 3),
    "second": (0.35, 90, 20),
    "short": (1.0, 30, 5),
    "middle": (1.0, 200, 5),
}


def simulated_first_tokens() -> dict[str, float]:
    """Return when the simulator's engine gives each first token under the same policy."""
    events, done = EventQueue(), dict[str, float]()
    ended = lambda engine, live: done.update({live.key: live.first_token_at})  # noqa: E731
    engine = SimulatedEngine("s", profile(MODEL, chunk=192), events, Pressure.PIN, ended, ended)
    engine.prompts = PromptSharing(TBT.tbt_s)

    def arrive(live: LiveConversation) -> None:
        live.turn_at = events.now
        engine.submit(live)

    for key, (at, prompt, output) in ARRIVALS.items():
        events.at(at, arrive, work(key, prompt, output))
    events.run()
    return done


def test_first_tokens_come_at_the_times_that_the_simulator_gives(small_model: Path) -> None:
    engine = Stepped(small_model, margin=0.0)
    began, seen = engine.now, dict[str, float]()
    coming = dict(ARRIVALS)
    for _ in range(400):
        for key in [key for key, (at, _, _) in coming.items() if began + at <= engine.now + 1e-9]:
            _, prompt, output = coming.pop(key)
            engine.ask(key, words(prompt, len(key)), output, priority=0)
        if not engine.advance():
            if not coming:
                break
            engine.now = began + min(at for at, _, _ in coming.values())
        for key in engine.first:
            seen.setdefault(key, engine.now - began)
    simulated = simulated_first_tokens()
    assert sorted(seen, key=seen.__getitem__) == sorted(simulated, key=simulated.__getitem__)
    for key, at in simulated.items():
        assert abs(seen[key] - at) < TBT.tbt_s, f"{key}: {seen[key]:.3f} s here, {at:.3f} s simulated"


@BOTH
def test_the_reported_curve_follows_measured_prompt_times(small_model: Path, overlapping: bool) -> None:
    """The engine starts with measurements from another day, when it was three times as slow."""
    engine = Stepped(small_model, overlapping, believed=MODEL.scaled(3))
    report, (chunk, tokens) = engine.scheduler.plugin("report"), (192, 4096)
    right = curve_of(MODEL, chunk).seconds(tokens)
    assert PrefillCurve(*report.speed.curve).seconds(tokens) == pytest.approx(3 * right, rel=0.01)
    asked = {f"p{number}": (words(150 + number, number), 2) for number in range(80)}
    start(engine, asked)
    engine.finish(asked)
    assert PrefillCurve(*report.speed.curve).seconds(tokens) == pytest.approx(right, rel=0.15)
