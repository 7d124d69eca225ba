"""Idle conversations leave a draining decoder with their KV; an arriving turn cancels the move."""

from typing import Any

from router.directory.api.messages import TurnEnded
from router.directory.moving import AT_ONCE, TRIES, IdleMove
from router.directory.table import BindingTable
from tests.router.directory.test_table import ask, place, table
from tests.support.engines import info, state


def idle(made: BindingTable, key: str, turn: int, now: float = 0.0) -> str:
    """Return the decoder of a conversation that had one turn."""
    engine = place(made, ask(key, turn=turn), now).engine
    made.turn_ended(key, "g", now, TurnEnded(prompt_tokens=1000, completion_tokens=10), turn=turn)
    return engine


def drained(made: BindingTable, engine: str, on: bool = True, seq: int = 1) -> None:
    made.engine_state(state(engine, seq, draining=on), 0.0)


def one_move(made: BindingTable, now: float) -> IdleMove:
    (move,) = made.idle_moves.begin(now)
    return move


def test_an_idle_conversation_is_bound_where_it_was_sent() -> None:
    made = table()
    left = idle(made, "c", 1)
    assert made.idle_moves.begin(1.0) == []
    drained(made, left)
    move = one_move(made, 1.0)
    assert (move.source.engine, move.target.engine != left) == (left, True)
    assert made.idle_moves.begin(1.5) == [], "it is under way"
    made.effects()
    assert made.idle_moves.end(move, True, 2.0)
    told: Any = made.describe("c")
    assert told["decoder"] == move.target.engine
    assert told["placements"][-1]["cause"] == "moved"
    assert told["placements"][-1]["receipt"]["move"]["reason"] == "drain"
    effects = made.effects()
    assert effects.releases == [(left, "c")] and effects.rows
    assert place(made, ask("c", turn=2), 3.0).engine == move.target.engine


def test_a_turn_cancels_a_move_and_the_sent_kv_is_released() -> None:
    made = table(decoders=3)
    left = idle(made, "c", 1)
    drained(made, left)
    move = one_move(made, 1.0)
    moved = place(made, ask("c", turn=2), 1.5)
    assert moved.cause == "moved"
    made.effects()
    assert not made.idle_moves.end(move, True, 2.0)
    releases = made.effects().releases
    assert releases == ([] if moved.engine == move.target.engine else [(move.target.engine, "c")])
    assert made.binding("c").engine == moved.engine  # type: ignore[union-attr]


def test_a_failed_send_leaves_the_conversation_in_place_and_releases_the_reservation() -> None:
    made = table()
    left = idle(made, "c", 1)
    drained(made, left)
    for attempt in range(TRIES):
        move = one_move(made, 1.0 + attempt)
        assert made.kv_in_use(move.target.engine) > 0
        assert not made.idle_moves.end(move, False, 1.5 + attempt)
        assert made.kv_in_use(move.target.engine) == 0
    assert made.idle_moves.begin(9.0) == [], "it is not tried for ever"
    assert made.binding("c").engine == left  # type: ignore[union-attr]
    drained(made, left, on=False, seq=2)
    assert made.idle_moves.begin(10.0) == []
    drained(made, left, seq=3)
    assert one_move(made, 11.0).key == "c", "the next drain tries again"


def test_a_restarted_target_does_not_have_the_sent_kv() -> None:
    made = table()
    left = idle(made, "c", 1)
    drained(made, left)
    move = one_move(made, 1.0)
    made.engine_up(info(move.target.engine, epoch=2))
    assert not made.idle_moves.end(move, True, 2.0)
    assert made.binding("c").engine == left  # type: ignore[union-attr]


def test_a_few_idle_conversations_are_sent_at_once_the_most_recent_first() -> None:
    made = table(decoders=1, kv_tokens=100_000)
    for number in range(AT_ONCE + 2):
        idle(made, f"c{number}", number + 1, now=float(number))
    place(made, ask("running", turn=99), 50.0)
    made.engine_up(info("d1", kv_tokens=100_000))
    drained(made, "d0")
    begun = [move.key for move in made.idle_moves.begin(51.0)]
    assert begun == [f"c{number}" for number in range(AT_ONCE + 1, 1, -1)]


def test_a_conversation_does_not_move_without_capacity_or_twice_within_a_minute() -> None:
    made = table()
    left = idle(made, "c", 1)
    drained(made, left)
    move = one_move(made, 1.0)
    assert made.idle_moves.end(move, True, 2.0)
    drained(made, move.target.engine)
    assert made.idle_moves.begin(3.0) == []
    drained(made, left, on=False, seq=2)
    assert made.idle_moves.begin(61.9) == []
    assert one_move(made, 62.0).target.engine == left
