"""Advice names the role that lacks engines, how many it lacks, and the numbers behind this."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.engines import Role
from placement.sizing.autoscaling import ScaleLimits, TierScaler
from placement.sizing.capacity import Action, Recommendation, Signals, Thresholds, advise, judge

LIMITS = Thresholds(high=0.85, target=0.7, low=0.4)
LONGEST_WAIT_S = 10.0


def signals(load: float = 0.6, pressure: float = 0.6, **more: float) -> Signals:
    values = {"prefillers": 2, "prefill_wait_s": 0.0, "decoders": 4, "running_share": 0.9}
    values |= {"prefill_load": load, "decoder_pressure": pressure, "observed_s": 600.0, **more}
    return Signals(**values)  # type: ignore[arg-type]


def given_for(seen: Signals, *, prefills: bool = True) -> dict[Action, int]:
    return {one.action: one.count for one in advise(seen, LIMITS, LONGEST_WAIT_S, prefills=prefills)}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (signals(), {}),
        (signals(load=1.2), {Action.ADD_PREFILLERS: 2}),
        (signals(pressure=0.95), {Action.ADD_DECODERS: 2}),
        (signals(load=0.86, pressure=0.86), {Action.ADD_PREFILLERS: 1, Action.ADD_DECODERS: 1}),
        (signals(pressure=0.95, running_share=0.4), {Action.ADD_DECODERS: 2, Action.RAISE_HOST_KV: 0}),
        (signals(pressure=0.95, running_share=0.8), {Action.ADD_DECODERS: 2}),
        (signals(load=0.1), {Action.LOWER_PREFILL_CAPS: 0}),
        (signals(pressure=0.1), {Action.LOWER_DECODE_CAPS: 0}),
        (signals(prefill_wait_s=12.0), {Action.ADD_PREFILLERS: 1}),
        (signals(prefillers=0, load=inf), {Action.ADD_PREFILLERS: 1}),
        (signals(decoders=0, pressure=1.0), {Action.ADD_DECODERS: 1}),
    ],
)
def test_each_signal_gives_the_expected_advice(seen: Signals, expected: dict[Action, int]) -> None:
    assert given_for(seen) == expected


@pytest.mark.parametrize(
    ("prompts_s", "lent", "expected"),
    [
        (2.2, 2.0, {}),
        (6.0, 2.0, {Action.ADD_PREFILLERS: 5}),  # 6 / 0.7 = 8.6 engines, of which there are 4
        (1.9, 4.0, {Action.LOWER_PREFILL_CAPS: 0}),
        (1.5, 4.0, {Action.NO_PREFILLERS: 2}),
        (1.5, 0.0, {}),
    ],
)
def test_elastic_fleets_need_fewer_prefillers_if_decoders_have_time_for_prompts(
    prompts_s: float, lent: float, expected: dict[Action, int]
) -> None:
    """The prefillers alone would be far too few for these prompts."""
    assert given_for(signals(load=3.0, prompts_s=prompts_s, lent=lent)) == expected


PREFILL_ANSWERS = [
    (signals(load=1.2), Action.ADD_PREFILLERS, 4),
    (signals(load=0.6), None, 2),
    (signals(load=0.1), Action.LOWER_PREFILL_CAPS, 1),
    (signals(load=0.6, prefill_wait_s=12.0), Action.ADD_PREFILLERS, 3),
    (signals(load=3.0, prompts_s=6.0, lent=2.0), Action.ADD_PREFILLERS, 7),
    (signals(load=3.0, prompts_s=2.2, lent=2.0), None, 2),
    (signals(load=3.0, prompts_s=2.2, lent=2.0, kept=1.8), Action.ADD_PREFILLERS, 3),
    (signals(load=3.0, prompts_s=2.2, lent=2.0, prefill_wait_s=12.0), Action.ADD_PREFILLERS, 3),
    (signals(load=3.0, prompts_s=1.9, lent=4.0), Action.LOWER_PREFILL_CAPS, 1),
    (signals(load=3.0, prompts_s=1.5, lent=4.0), Action.NO_PREFILLERS, 1),
]
DECODE_ANSWERS = [
    (signals(pressure=0.95), Action.ADD_DECODERS, 6),
    (signals(pressure=0.95, running_share=0.4), Action.ADD_DECODERS, 6),
    (signals(pressure=0.6), None, 4),
    (signals(pressure=0.6, decoder_wait_s=9.0), None, 4),
    (signals(pressure=0.6, decoder_wait_s=12.0), Action.ADD_DECODERS, 6),
    (signals(pressure=0.1, decoder_wait_s=12.0), Action.ADD_DECODERS, 6),
    (signals(pressure=0.1), Action.LOWER_DECODE_CAPS, 3),
]


@pytest.mark.parametrize(
    ("role", "seen", "advised", "replicas"),
    [
        *((Role.PREFILL, *answer) for answer in PREFILL_ANSWERS),
        *((Role.DECODE, *answer) for answer in DECODE_ANSWERS),
    ],
)
def test_the_autoscaler_does_what_is_advised(
    role: Role, seen: Signals, advised: Action | None, replicas: int
) -> None:
    """The autoscaler adds as many engines as are advised, but removes only one at a time."""
    found = given_for(seen)
    of_the_role = [one for one in found if ("decode" in one.value) == (role is Role.DECODE)]
    assert of_the_role == ([advised] if advised else [])
    judged = judge(role, seen, LIMITS, LONGEST_WAIT_S)
    scaler = TierScaler(ScaleLimits(1, 8, LIMITS, cool_down_s=0.0, calm_s=10.0))
    decided = [scaler.decide(judged, judged.engines, now).replicas for now in (0.0, 10.0)]
    assert (max if replicas > judged.engines else min)(decided) == replicas
    if advised in (Action.ADD_PREFILLERS, Action.ADD_DECODERS):
        assert found[advised] == replicas - judged.engines


def test_a_fleet_without_disaggregation_gets_no_advice_on_prefillers() -> None:
    assert given_for(signals(load=0.0, prefillers=0), prefills=False) == {}


def test_the_reason_for_advice_has_the_numbers_behind_it() -> None:
    (one,) = advise(signals(load=1.2, prefill_wait_s=4.0), LIMITS, LONGEST_WAIT_S)
    assert one == Recommendation(
        Action.ADD_PREFILLERS,
        2,
        "prompts ask for 120% of the time of 2 prefillers; at this rate their queues pass 10 s in 30 s; "
        "4 would be at 60%",
    )


@given(st.floats(0.86, 20), st.integers(1, 500))
def test_the_advised_number_of_engines_suffices_and_one_fewer_would_not(load: float, engines: int) -> None:
    count = given_for(signals(pressure=load, decoders=engines))[Action.ADD_DECODERS]
    assert load * engines / (engines + count) <= LIMITS.target + 1e-6
    assert count == 1 or load * engines / (engines + count - 1) > LIMITS.target
