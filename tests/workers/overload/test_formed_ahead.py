"""On real vLLM: members of a group tell each other of their next batches, and cut their prompts by it.
Answers stay what they were; what it gives on this machine is printed (`-s`)."""

from collections.abc import Iterator
from dataclasses import astuple
from statistics import mean, median, quantiles

import pytest

from deploy.small_model import ModelShape, make_model
from placement.scheduling.latency_model import LatencyModel
from tests.workers.overload.together import Request, SplitTogether, requests, together

pytestmark = pytest.mark.engine

ROUNDS = 3  # of both ways, in turns
# As an undisturbed core shows them. What engines learn while others use their cores is not what is tested.
STEPS = LatencyModel(per_token=2e-4, per_attended=0.0, per_context=1e-7, constant=6e-3, per_request=5e-4)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitTogether]:
    out = tmp_path_factory.mktemp("model") / "wider"
    make_model(out, ModelShape(layers=4, hidden=512, heads=8, head_dim=64, intermediate=2048))
    with together(out, blocks=120, batched_tokens=512) as engines:
        yield engines


def writers() -> list[Request]:
    """Turns that decode, of the first engine."""
    return requests(5, count=6, output=80)


def readers() -> list[Request]:
    """Prompts, of the second."""
    return [
        (f"long-{name}", (prompt * 30)[: 600 + 20 * number], 8)
        for number, (name, prompt, _) in enumerate(requests(6, count=8))
    ]


def played(both: SplitTogether, on: bool) -> tuple[dict[str, list[int]], list[float], list[float], float]:
    """Answers, steps of the engine that decodes, those of the one with prompts, and the bubble: the share of
    both stages' time in which they waited for the other."""
    both.fresh()
    for engine in both.engines:
        engine.form_ahead(on)
        engine.knows(STEPS)
    both.drop()
    before = [engine.spent() for engine in both.engines]
    for engine in both.engines:
        engine.taken_steps()
    both.first.add(writers())
    both.first.until(lambda state: state["generated"] > 20)
    both.second.add(readers())
    both.second.until(lambda state: not state["left"])
    spent = [engine.spent().since(then) for engine, then in zip(both.engines, before, strict=True)]
    steps = [engine.taken_steps() for engine in both.engines]
    bubble = sum(one.idle_s for one in spent) / sum(map(sum, steps))
    assert all(value > 0 for one in spent for value in astuple(one))
    answers = both.finish()
    both.restore()
    return answers, steps[0], steps[1], bubble


def test_prompts_are_cut_where_a_peer_would_wait(both: SplitTogether) -> None:
    both.fresh()
    both.first.add(writers())
    both.second.add(readers())
    right = both.finish()
    seen: dict[bool, list[tuple[list[float], list[float], float]]] = {False: [], True: []}
    for turn in range(ROUNDS):
        for on in (False, True) if turn % 2 else (True, False):
            answers, *rest = played(both, on)
            assert answers == right
            seen[on].append((rest[0], rest[1], rest[2]))
    for on, rounds in seen.items():
        decoding = [step for one, _, _ in rounds for step in one]
        print(
            f"\nforms_ahead={on}: step of who decodes p50 {median(decoding) * 1e3:.0f} ms, "
            f"p95 {quantiles(decoding, n=20)[-1] * 1e3:.0f} ms; who has prompts took "
            f"{mean(sum(own) for _, own, _ in rounds):.2f} s in {mean(len(own) for _, own, _ in rounds):.0f} "
            f"steps; bubble {mean(share for _, _, share in rounds):.1%}"
        )
    cut, whole = (median(len(own) for _, own, _ in seen[on]) for on in (True, False))
    assert cut > 1.2 * whole, "prompts take more steps, and none of them makes the others wait long"
