"""Prefillers that idle while prompts wait on decoders take conversations, and only then."""

from collections.abc import Iterator

import pytest

from placement.engines import Role
from placement.routing.least_kv import FirstTurn, LaterTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import PlacerSettings, PrefillerRoles
from placement.routing.prefiller_roles import IdlePrefillers
from placement.routing.receipts import Placement, Why
from placement.sizing.capacity import Action, Thresholds, advise, judge
from tests.placement.conftest import CURVE, engine, state

TICK_S = 0.25


def seconds(of: float, since: float = 0.0) -> Iterator[float]:
    return (since + tick * TICK_S for tick in range(int(of / TICK_S)))


def test_an_idle_prefiller_takes_conversations_while_prompts_queue_on_decoders() -> None:
    roles = IdlePrefillers(ttft_s=2.0)
    taking = []
    for now in seconds(60.0):
        queue = 20.0 <= now < 40.0
        roles.decoder_reported("d0", 2.0 if queue else 0.0, now)
        roles.prefiller_reported("p0", idle=True, now=now)
        taking.append((now, bool(roles.taking)))
    began = min(now for now, takes in taking if takes)
    ended = min(now for now, takes in taking if now > began and not takes)
    assert 20.0 < began < 25.0
    assert 40.0 < ended < 60.0
    assert roles.changes == 2


def test_a_prefiller_that_is_mostly_busy_takes_no_conversations() -> None:
    roles = IdlePrefillers(ttft_s=2.0)
    for tick, now in enumerate(seconds(60.0)):
        roles.decoder_reported("d0", 2.0, now)
        roles.prefiller_reported("p0", idle=tick % 4 == 0, now=now)
        assert not roles.taking


def test_no_role_changes_while_the_load_swings_between_the_two_bounds() -> None:
    """Both the idle time and the wait swing between their two bounds, in periods of half a minute."""
    roles = IdlePrefillers(ttft_s=2.0)
    for now in seconds(20.0):
        roles.decoder_reported("d0", 2.0, now)
        roles.prefiller_reported("p0", idle=True, now=now)
    assert roles.taking == {"p0"}
    for tick, now in enumerate(seconds(600.0, since=20.0)):
        slow = int(now / 15) % 2
        roles.decoder_reported("d0", 0.7 if slow else 0.3, now)
        roles.prefiller_reported("p0", idle=tick % 20 < (13 if slow else 7), now=now)
    assert roles.changes == 1


def a_placer(roles: PrefillerRoles = PrefillerRoles.ELASTIC, prefillers: int = 1) -> Placer:
    settings = PlacerSettings(fill=1.0, headroom_tokens=0, max_prefill_wait_s=1e9, roles=roles)
    placer = Placer(settings, {"prefill": CURVE, "decode": CURVE})
    for number in range(prefillers):
        placer.engine_up(engine(f"p{number}", Role.PREFILL, 1_000_000))
    for number in range(2):
        placer.engine_up(engine(f"d{number}", kv_tokens=1_000_000))
    return placer


def queue_on_decoders(placer: Placer, until_s: float = 10.0, share: float = 1.0) -> float:
    """Report until `until_s` that prompts wait on decoders and the prefiller is idle; return `until_s`."""
    for number, now in enumerate(seconds(until_s), start=1):
        for name in ("d0", "d1"):
            busy = {"waiting_prompt_tokens": 20_000, "prompt_tokens_per_s": 20_000.0}
            placer.observe(state(name, 50_000, number, **busy), now)
        placer.observe(state("p0", 0, number, running=0, prompt_share=share), now)
    return until_s


def test_an_idle_prefiller_keeps_a_new_conversation_to_its_end_and_the_receipt_says_why() -> None:
    placer = a_placer()
    now = queue_on_decoders(placer)
    placed = placer.place(FirstTurn("a", 10_000), now)
    assert isinstance(placed, Placement)
    assert (placed.decoder, placed.prefiller) == ("p0", None)
    assert placed.receipt.decoder.why is Why.IDLE_PREFILLER
    assert placed.receipt.decoder.runners_up[0].engine == "d0", "the decoder with the least KV in use"
    assert placed.receipt.estimates is not None
    assert placed.receipt.estimates.local_s == pytest.approx(CURVE.seconds(10_000))
    later = placer.place_later(LaterTurn("a", "p0", 30_000, 20_000), now)
    assert (later.decoder, later.prefiller, later.receipt.decoder.why) == ("p0", None, Why.BOUND)
    assert placer.kv_in_use("p0") == 10_000
    assert set(placer.engine_down("p0")) == {"a"}


def test_a_prefiller_with_fixed_roles_takes_no_conversations() -> None:
    placer = a_placer(PrefillerRoles.FIXED)
    placed = placer.place(FirstTurn("a", 10_000), queue_on_decoders(placer))
    assert isinstance(placed, Placement) and placed.decoder != "p0"


def test_decoders_and_idle_prefillers_share_conversations_by_the_kv_in_use() -> None:
    placer = a_placer()
    now = queue_on_decoders(placer)
    for number in range(12):
        placer.place(FirstTurn(f"a{number}", 10_000), now + number)
    in_use = [placer.kv_in_use(name) for name in ("p0", "d0", "d1")]
    assert sum(in_use) == 220_000
    assert max(in_use) - min(in_use) <= 20_000, in_use


def test_a_prefiller_takes_no_conversation_that_another_engine_would_answer_sooner() -> None:
    placer = a_placer()
    now = queue_on_decoders(placer)
    held = placer.place(FirstTurn("held", 10_000), now)
    assert isinstance(held, Placement) and held.decoder == "p0"
    for number in range(3):
        placer.observe(
            state("p0", 0, 1_000 + number, waiting_prompt_tokens=200_000, prompt_tokens_per_s=20_000.0), now
        )
    placed = placer.place(FirstTurn("a", 10_000), now)
    assert isinstance(placed, Placement) and placed.decoder != "p0"


@pytest.mark.parametrize(
    ("roles", "share", "taking", "prompt_load"),
    [(PrefillerRoles.FIXED, 1.0, 0, 1 / 3), (PrefillerRoles.ELASTIC, 0.5, 1, 1 / 2.5)],
)
def test_advice_and_autoscaler_count_the_prefillers_that_hold_conversations(
    roles: PrefillerRoles, share: float, taking: int, prompt_load: float
) -> None:
    """The KV of these prefillers counts as decoders' KV, and the time that their turns leave for prompts."""
    placer = a_placer(roles)
    now = queue_on_decoders(placer, share=share)
    seconds_of_prefill = CURVE.seconds(10_000)
    while placer.signals(0, now).prompts_s < 1.0:
        placer.prompt_arrived(10_000, now)
    placer.observe_overload(now)
    signals = placer.signals(0, now)
    assert signals.taking == taking
    assert signals.prompt_load == pytest.approx(prompt_load, rel=2 * seconds_of_prefill)
    assert judge(Role.PREFILL, signals, Thresholds(), 10.0).load == signals.prompt_load
    assert signals.decoder_pressure == pytest.approx(100_000 / (2_000_000 + 750_000 * taking))
    reasons = [
        one.reason for one in advise(signals, Thresholds(), 10.0) if one.action is Action.LOWER_DECODE_CAPS
    ]
    assert [("prefiller" in reason) for reason in reasons] == [bool(taking)]


def test_signals_have_the_mean_wait_over_decoders_whose_speed_is_known() -> None:
    placer = a_placer(PrefillerRoles.FIXED)
    now = queue_on_decoders(placer)
    assert placer.signals(0, now).decoder_wait_s == pytest.approx(1.0)
    placer.observe(
        state("d1", 50_000, 1_000, waiting_prompt_tokens=60_000, prompt_tokens_per_s=20_000.0), now
    )
    assert placer.signals(0, now).decoder_wait_s == pytest.approx(2.0)
    unknown = Placer(PlacerSettings(), {"prefill": CURVE})
    unknown.engine_up(engine("new"))
    unknown.observe(state("new", 50_000, 1, waiting_prompt_tokens=20_000), now)
    assert unknown.signals(0, now).decoder_wait_s == 0.0


def test_turns_that_fit_on_no_decoder_add_to_the_kv_load_of_the_decoders() -> None:
    """Two decoders are 80 % full, and a conversation that needs half of a decoder's KV tokens waits."""
    placer = a_placer(PrefillerRoles.FIXED)
    for name in ("d0", "d1"):
        placer.observe(state(name, 800_000, 1), 0.0)
    placer.observe_overload(0.0)
    assert placer.signals(1_600_000, 0.0).decoder_pressure == pytest.approx(0.8)
    for second in range(1, 600):
        placer.observe_overload(float(second), [500_000])
    signals = placer.signals(1_600_000, 600.0)
    assert signals.decoder_pressure == pytest.approx(1.05, abs=0.01)
    assert Action.ADD_DECODERS in {one.action for one in advise(signals, Thresholds(), 10.0)}
