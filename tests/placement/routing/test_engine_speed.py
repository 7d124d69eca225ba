"""Old measurements of an engine lose weight, and those of engines with the same hardware gain it."""

from dataclasses import replace

import pytest

from placement.engines import Role
from placement.routing.engine_speed import EngineSpeeds
from placement.routing.least_kv import FirstTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import PlacerSettings
from placement.routing.prefill_queue import HALF_LIFE_S
from placement.routing.receipts import Placement
from placement.scheduling.prefill_curve import PrefillCurve
from tests.placement.conftest import engine, state

FAST, SLOW = (0.02, 4e-5, 2e-10), (0.04, 8e-5, 4e-10)
TOKENS = 8_192


def seconds(curve: tuple[float, float, float]) -> float:
    return PrefillCurve(*curve).seconds(TOKENS)


class Shown:
    """Estimator for engines of equal hardware, whose reports the test makes up."""

    def __init__(self, *tiers: str, alike: bool = True) -> None:
        self.speeds = EngineSpeeds(dict.fromkeys(tiers, "kind") if alike else {})
        self.seq = 0
        for number, tier in enumerate(tiers):
            self.speeds.add(f"e{number}", tier)

    def says(self, name: str, curve: tuple[float, float, float], prompts: float, now: float) -> float:
        """Report a curve for an engine, and return the estimated seconds of a prompt there."""
        self.seq += 1
        report = replace(state(name, 0, self.seq, prompts=int(prompts)), prefill_curve=curve)
        found = self.speeds.observe(report, now).estimate
        assert found is not None
        return found.seconds(TOKENS)


def test_an_engine_that_was_slow_long_ago_is_estimated_like_engines_of_its_hardware() -> None:
    shown = Shown("prefill", "decode")
    assert shown.says("e0", SLOW, 100.0, 0.0) == pytest.approx(seconds(SLOW))
    taken = []
    for step in range(1, 11):
        now = step * HALF_LIFE_S / 2
        shown.says("e1", FAST, 1000.0 + step, now)
        taken.append(shown.says("e0", SLOW, 100.0, now))
    assert taken == sorted(taken, reverse=True) and taken[-1] < 1.05 * seconds(FAST)
    assert shown.says("e0", SLOW, 200.0, 200.0) == pytest.approx(seconds(SLOW)), "it has computed another one"


def test_a_faster_engine_keeps_its_own_estimate() -> None:
    shown = Shown("prefill", "decode")
    shown.says("e0", FAST, 100.0, 0.0)
    shown.says("e1", SLOW, 1.0, 90.0)
    assert shown.says("e0", FAST, 100.0, 90.0) == pytest.approx(seconds(FAST))


def test_engines_of_other_hardware_do_not_change_an_estimate() -> None:
    shown = Shown("prefill", "decode", alike=False)
    shown.says("e0", SLOW, 100.0, 0.0)
    shown.says("e1", FAST, 1.0, 90.0)
    assert shown.says("e0", SLOW, 100.0, 90.0) == pytest.approx(seconds(SLOW))


def test_an_engine_is_estimated_by_its_best_curve_when_none_computed_lately() -> None:
    """Another process slowed the engine down for a while, and no other engine has its hardware."""
    shown = Shown("prefill")
    shown.says("e0", FAST, 1, 0.0)
    shown.says("e0", FAST, 2, 1.0)
    assert shown.says("e0", SLOW, 3, 2.0) == pytest.approx(seconds(SLOW))
    taken = [shown.says("e0", SLOW, 3, now) for now in (12.0, 42.0, 122.0)]
    assert taken == sorted(taken, reverse=True) and taken[-1] < 1.15 * seconds(FAST)
    for prompt in range(4, 60):
        shown.says("e0", SLOW, prompt, 122.0 + prompt)
    assert shown.says("e0", SLOW, 59, 400.0) > 0.98 * seconds(SLOW), "it has become slower for good"


def test_a_new_engine_is_estimated_like_engines_of_its_hardware() -> None:
    shown = Shown("decode", "decode")
    guess = shown.says("e1", SLOW, 0.0, 0.0)
    assert guess == pytest.approx(seconds(SLOW)), "a guess, while nobody has shown anything"
    shown.says("e0", FAST, 10.0, 1.0)
    shown.says("e0", FAST, 11.0, 1.5)
    assert shown.says("e1", SLOW, 0.0, 3.0) == pytest.approx(seconds(FAST))


def test_the_first_report_of_an_engine_may_be_old() -> None:
    """After a restart of the directory, rates and curves may be hours old."""
    shown = Shown("prefill", "decode")
    shown.says("e0", FAST, 10.0, 100.0)
    shown.says("e1", SLOW, 20.0, 100.0)
    assert shown.says("e1", SLOW, 20.0, 101.0) == pytest.approx(seconds(SLOW))
    shown.says("e0", FAST, 11.0, 102.0)
    assert shown.says("e1", SLOW, 20.0, 104.0) < seconds(SLOW)


def test_a_prefiller_that_started_slowly_gets_prompts_again() -> None:
    """Without prompts a prefiller cannot show its speed; the other one would get all prompts for ever."""
    curve = PrefillCurve(*SLOW)
    placer = Placer(
        PlacerSettings(headroom_tokens=0), {"prefill": curve}, {"prefill": "cpu", "decode": "cpu"}
    )
    placer.engine_up(engine("p0", Role.PREFILL))
    placer.engine_up(engine("d0", kv_tokens=10_000_000))

    def reported(name: str, seq: int, curve: tuple[float, float, float], rate: float, now: float) -> None:
        idle = state(name, 0, seq, prompt_tokens_per_s=rate, prompts=int(rate), running=0)
        assert placer.observe(replace(idle, prefill_curve=curve), now)

    def placed(key: str, now: float) -> str | None:
        answer = placer.place(FirstTurn(key, TOKENS), now)
        assert isinstance(answer, Placement)
        placer.release(key, now)
        return answer.prefiller

    reported("p0", 1, SLOW, 50.0, 0.0)
    reported("d0", 1, FAST, 1000.0, 0.0)
    assert placed("first", 0.0) is None
    found = []
    for step in range(1, 31):
        now = float(step * 10)
        reported("d0", 1 + step, FAST, 1000.0 + step, now)
        reported("p0", 1 + step, SLOW, 50.0, now)
        found.append(placed(f"a{step}", now))
    assert "p0" in found
