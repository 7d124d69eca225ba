"""Waiting turns are served fairly by owner, flow and class, and a look at the queue stays cheap."""

from collections.abc import Callable

import pytest

from placement.priorities import QUANTUM, ClassOrder
from placement.routing.receipts import Refusal, RefusalReason
from router.directory.api.messages import Ask, Placed
from router.directory.waiting import FLOWS, MAX_WAITING, Waiter, Waiting

FULL = Refusal(RefusalReason.NO_CAPACITY, "full", 1.0)
TURN = 1000  # tokens of a turn
BETTER_S = 10.0


class Queue:
    """Turns that wait for a fleet that accepts only as many turns as the test asks it to."""

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.served: list[str] = []
        self._turns = 0

    def ask(self, key: str, flow: str = "", queue_weight: float = 0.0, priority_weight: float = 0.0) -> Ask:
        self._turns += 1
        more = {
            "turn": self._turns,
            "flow": flow,
            "queue_weight": queue_weight,
            "priority_weight": priority_weight,
        }
        return Ask(key=key, gateway="g", prompt_tokens=TURN, wait_s=1000.0, **more)

    def waits(
        self,
        key: str,
        now: float,
        flow: str = "",
        queue_weight: float = 0.0,
        priority_weight: float = 0.0,
        tokens: int = TURN,
    ) -> None:
        asked = self.ask(key, flow, queue_weight, priority_weight)
        self.waiting.add(Waiter(asked, tokens, now - queue_weight, now + 1000.0, FULL, lambda outcome: None))

    def serve(self, now: float, count: int = 1) -> None:
        left = count

        def attempt(asked: Ask) -> Placed | Refusal:
            nonlocal left
            if not left:
                return FULL
            left -= 1
            self.served.append(asked.key)
            return Placed(asked.key, "d0", 1, None, False, "first_turn", {}, 0)

        self.waiting.serve(now, attempt)


def served_at(key: str, until: int, comes: Callable[[Queue, int], None]) -> int:
    """Return the second at which `key` is served by a fleet that serves one turn per second."""
    queue = Queue()
    for now in range(until):
        comes(queue, now)
        queue.serve(now)
        if key in queue.served:
            return now
    return until


def test_a_lower_class_turn_is_served_in_time_while_other_owners_send_many_turns() -> None:
    def comes(queue: Queue, now: int) -> None:
        if now == 0:
            queue.waits("b:lesser", 0.0)
        queue.waits(f"b:better{now}", now, queue_weight=BETTER_S)
        queue.waits(f"a:{now}", now)

    assert BETTER_S < served_at("b:lesser", 120, comes) <= BETTER_S + 2 * QUANTUM // TURN


def test_a_lower_class_turn_is_served_in_time_while_other_flows_send_many_turns() -> None:
    def comes(queue: Queue, now: int) -> None:
        if now == 0:
            queue.waits("b:lesser", 0.0, flow="x")
        queue.waits(f"b:better{now}", now, flow="x", queue_weight=BETTER_S)
        queue.waits(f"b:{now}", now, flow="y")

    assert BETTER_S < served_at("b:lesser", 120, comes) <= BETTER_S + 2 * QUANTUM // TURN


def test_no_turn_of_the_same_flow_passes_an_overdue_lower_class_turn() -> None:
    """A lower-class turn of another owner was served a moment ago."""
    queue = Queue()
    queue.waits("b:lesser", 0.0)
    queue.waiting.served(queue.ask("a:lesser"), TURN, 11.0)
    better = queue.ask("b:better", queue_weight=BETTER_S)
    assert queue.waiting.may_pass(better, TURN, 5.0 - BETTER_S, 5.0)
    assert not queue.waiting.may_pass(better, TURN, 12.0 - BETTER_S, 12.0)


@pytest.mark.parametrize("flow", ["", "x"])
def test_a_priority_counts_only_among_the_turns_of_its_owner(flow: str) -> None:
    """Clients choose priorities themselves, so that a priority must not pass turns of other owners."""
    queue = Queue()
    queue.waits("b:first", 0.0)
    queue.waits("a:second", 1.0)
    queue.waits("a:urgent", 2.0, flow=flow, priority_weight=10.0)
    queue.waits("b:third", 3.0)
    queue.serve(4.0, count=4)
    assert queue.served == ["b:first", "a:urgent", "a:second", "b:third"]


def test_an_owner_with_only_high_priority_turns_gets_no_larger_share() -> None:
    queue = Queue()
    for number in range(40):
        queue.waits(f"a:{number}", number / 100, priority_weight=10.0)
        queue.waits(f"b:{number}", number / 100 + 0.001)
    queue.serve(30.0, count=40)
    assert sum(key.startswith("a:") for key in queue.served) == 20
    assert queue.served[:4] == ["a:0", "b:0", "a:1", "b:1"]


def test_an_overdue_low_priority_turn_takes_no_slot_from_another_owner() -> None:
    queue = Queue()
    queue.waits("a:low", 0.0, priority_weight=-10.0)
    queue.waits("b:first", 1.0)
    for number in range(3):
        queue.waits(f"a:high{number}", 2.0 + number, priority_weight=10.0)
    queue.waits("b:second", 6.0)
    queue.serve(30.0, count=6)
    assert queue.served[:3] == ["a:low", "b:first", "a:high0"]
    assert queue.served.index("b:second") < 6


def test_higher_class_turns_of_a_flow_pass_another_flow_for_one_round() -> None:
    queue, passed = Queue(), 0
    queue.waits("a:large", 0.0, flow="x")
    for _ in range(20):
        asked = queue.ask("a:better", flow="y", queue_weight=BETTER_S)
        if queue.waiting.may_pass(asked, TURN, 1.0 - BETTER_S, 1.0):
            queue.waiting.served(asked, TURN, 1.0)
            passed += 1
    assert passed == QUANTUM // TURN


def test_many_new_flows_delay_an_older_flow_by_a_bounded_number_of_turns() -> None:
    queue = Queue()
    for number in range(3):
        queue.waits(f"a:steady{number}", 0.0, flow="steady", tokens=QUANTUM)
    for number in range(1000):
        queue.waits(f"a:{number}", 1.0, flow=f"new{number}", tokens=QUANTUM)
    queue.serve(2.0, count=1003)
    at = [queue.served.index(f"a:steady{number}") for number in range(3)]
    assert len(queue.served) == 1003 and at[2] <= 2 * FLOWS


def test_each_flow_up_to_the_limit_has_a_queue_of_its_own() -> None:
    queue = Queue()
    for flow in range(FLOWS):
        for _ in range(5):
            queue.waits(f"a:{flow}", float(flow), flow=str(flow), tokens=QUANTUM)
    queue.serve(1000.0, count=5 * FLOWS)
    assert queue.served == [f"a:{flow}" for flow in range(FLOWS)] * 5


def test_looking_at_the_queue_costs_no_more_if_each_turn_has_its_own_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, level = 0, ClassOrder.level

    def counted(of: ClassOrder, *said: float) -> float:
        nonlocal looked
        looked += 1
        return level(of, *said)

    queue = Queue()
    for number in range(MAX_WAITING // 2):
        queue.waits(f"a:{number}", 0.0, flow=f"new{number}")
    monkeypatch.setattr(ClassOrder, "level", counted)
    queue.waiting.may_pass(queue.ask("a:more", flow="more", queue_weight=BETTER_S), TURN, -BETTER_S, 0.0)
    assert 0 < looked <= 4 * FLOWS
    looked = 0
    queue.serve(1.0, count=1)
    assert 0 < looked <= 8 * FLOWS  # one turn is placed, and the next does not fit
