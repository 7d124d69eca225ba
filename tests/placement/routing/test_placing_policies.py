import json

import pytest

from placement.engines import Role
from placement.routing.least_kv import FirstTurn, LaterTurn
from placement.routing.placer import MissingCurve, Placer
from placement.routing.placer_settings import PlacerSettings, PlacingPolicy
from placement.routing.receipts import Placement, Why
from tests.placement.conftest import CURVE, MakeFleet, engine


@pytest.mark.parametrize(
    ("policy", "first", "small", "large"),
    [
        (PlacingPolicy.CONSERVE, True, False, True),
        (PlacingPolicy.COLLOCATED, False, False, False),
        (PlacingPolicy.FULL_DISAGGREGATION, True, True, True),
    ],
)
def test_each_policy_sends_the_expected_turns_to_a_prefiller(
    fleet: MakeFleet, policy: PlacingPolicy, first: bool, small: bool, large: bool
) -> None:
    placer = fleet(policy=policy)
    placed = placer.place(FirstTurn("c", 1000), 0.0)
    assert isinstance(placed, Placement)
    assert (placed.prefiller is not None) is first
    for uncached, expected in ((200, small), (20_000, large)):
        later = placer.place_later(LaterTurn("c", placed.decoder, 30_000, uncached), 0.0)
        assert (later.prefiller is not None) is expected
        assert later.decoder == placed.decoder and later.receipt.decoder.why is Why.BOUND


def test_a_conversation_that_lost_its_decoder_is_restored_from_a_shared_tier(fleet: MakeFleet) -> None:
    again = FirstTurn("c", 1000, had_decoder=True)
    for shared, first in ((True, None), (False, "p0")):
        placer = fleet(shared_tier=shared)
        placed, new = placer.place(again, 0.0), placer.place(FirstTurn("new", 1000), 0.0)
        assert isinstance(placed, Placement) and isinstance(new, Placement)
        assert placed.prefiller == first and new.prefiller == "p0"
        assert (placed.receipt.prefiller.why is Why.RESTORED) is shared


def test_the_collocated_policy_places_conversations_on_every_engine(fleet: MakeFleet) -> None:
    placer = fleet(policy=PlacingPolicy.COLLOCATED)
    used = {
        p.decoder for i in range(4) if isinstance(p := placer.place(FirstTurn(str(i), 100), 0.0), Placement)
    }
    assert used == {"p0", "d0", "d1", "d2"}


def test_a_prefiller_whose_tier_has_no_curve_is_refused_when_it_comes_up() -> None:
    placer = Placer(PlacerSettings(), {"other": CURVE})
    with pytest.raises(MissingCurve, match="prefill"):
        placer.engine_up(engine("p0", Role.PREFILL))


def test_a_receipt_of_a_large_fleet_is_short_json(fleet: MakeFleet) -> None:
    placer = fleet(prefillers=50, decoders=50)
    placed = placer.place(FirstTurn("c", 1000), 12.5)
    assert isinstance(placed, Placement)
    text = json.dumps(placed.receipt.to_json())
    assert len(text) < 1500
    assert json.loads(text)["decoder"]["why"] == "least_kv_in_use"


@pytest.mark.parametrize(
    ("policy", "stays"), [(PlacingPolicy.CONSERVE, True), (PlacingPolicy.FULL_DISAGGREGATION, False)]
)
def test_a_large_later_turn_does_not_queue_for_longer_than_its_prefill(
    fleet: MakeFleet, policy: PlacingPolicy, stays: bool
) -> None:
    """The decoder can compute the turn itself. The full-disaggregation baseline queues it regardless."""
    placer = fleet(policy=policy, max_prefill_wait_s=1e9)
    alone = placer.place_later(LaterTurn("c", "d0", 30_000, 20_000), 0.0)
    assert alone.prefiller == "p0"
    placer.release("c", 0.0)
    placer.place(FirstTurn("queued", 60_000), 0.0)
    behind = placer.place_later(LaterTurn("c", "d0", 30_000, 20_000), 0.0)
    assert (behind.prefiller is None) is stays
    if stays:
        assert behind.receipt.prefiller.why is Why.PREFILLERS_BUSY
