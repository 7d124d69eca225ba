"""Deficit round robin serves waiting owners about equally and starves none."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from placement.priorities import FairRounds, QueueHead

QUANTUM, LARGEST = 100, 350
TURNS = st.lists(st.tuples(st.integers(1, LARGEST), st.floats(0, 1000)), min_size=1, max_size=60)


def heads(queues: dict[str, deque[tuple[int, float]]]) -> dict[str, QueueHead]:
    return {name: QueueHead(*queue[0]) for name, queue in queues.items() if queue}


@given(st.lists(TURNS, min_size=2, max_size=5))
def test_waiting_owners_get_about_equal_tokens(turns: list[list[tuple[int, float]]]) -> None:
    queues = {f"n{index}": deque(sorted(one, key=lambda turn: turn[1])) for index, one in enumerate(turns)}
    rounds, served = FairRounds(QUANTUM), dict.fromkeys(queues, 0)
    while all(queues.values()):
        first = rounds.order(heads(queues))[0]
        tokens, _ = queues[first].popleft()
        rounds.served(first, tokens)
        served[first] += tokens
        assert max(served.values()) - min(served.values()) <= QUANTUM + 2 * LARGEST


@given(TURNS, st.integers(1, LARGEST))
def test_an_owner_gains_nothing_by_sending_turns_one_at_a_time(
    others: list[tuple[int, float]], size: int
) -> None:
    """One owner always has turns that wait. The other sends one urgent turn at a time, again and again."""
    steady, rounds, back = deque(others), FairRounds(QUANTUM), 0
    waited = 0
    while steady:
        queues = {"steady": steady, "back": deque([(size, -1.0)])}
        first = rounds.order(heads(queues))[0]
        tokens, _ = queues[first][0]
        rounds.served(first, tokens)
        if first == "steady":
            steady.popleft()
            waited += tokens
        else:
            back += tokens
        assert back <= waited + QUANTUM + 2 * LARGEST


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, LARGEST)), max_size=80))
def test_a_large_turn_waits_for_a_bounded_number_of_turns_of_other_owners(
    coming: list[tuple[str, int]],
) -> None:
    rounds, before = FairRounds(QUANTUM), 0
    for name, size in coming:
        order = rounds.order({"large": QueueHead(LARGEST, 0.0), name: QueueHead(size, -1.0)})
        if order[0] == "large":
            return
        rounds.served(name, size)
        before += size
        assert before <= 3 * (LARGEST + QUANTUM + LARGEST)


def test_within_a_round_the_turn_that_is_due_first_comes_first() -> None:
    rounds = FairRounds(QUANTUM)
    waiting = {"a": QueueHead(10, 5.0), "b": QueueHead(10, 4.0), "c": QueueHead(QUANTUM + 1, 1.0)}
    assert rounds.order(waiting) == ["b", "a"]
    rounds.served("b", 95)
    assert rounds.order(waiting) == ["a"]
    rounds.served("a", 95)
    assert rounds.order(waiting) == ["c", "b", "a"]  # the next round
