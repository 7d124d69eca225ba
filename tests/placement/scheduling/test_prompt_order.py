"""Order of prompts, and the size of their chunks when other requests decode."""

from hypothesis import given
from hypothesis import strategies as st

from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prompt_order import LEAST_CHUNK, PromptSharing

MODEL = LatencyModel(1e-5, 2.5e-9, 2e-8, 0.012)
SHARING = PromptSharing(tbt_s=0.06)

rows = st.lists(st.integers(1, 40_000), min_size=1, max_size=40)


@given(rows, st.integers(0, 60_000), st.integers(1, 60_000))
def test_running_requests_keep_their_target_unless_prompts_need_half_the_iteration(
    contexts: list[int], computed: int, want: int
) -> None:
    work = BatchWork.of((1, context) for context in contexts)
    decoding_s = MODEL.seconds(work)
    tokens = SHARING.tokens(MODEL, work, decoding_s, computed, want)
    assert 0 <= tokens <= want
    most_s = max(SHARING.tbt_s, 2 * decoding_s)
    assert not tokens or MODEL.seconds(work.plus(tokens, computed)) <= most_s + 1e-12
    assert 0.5 <= SHARING.share(decoding_s) < 1


def test_a_shorter_prompt_is_due_first_unless_a_longer_one_has_waited_for_long() -> None:
    long_one = SHARING.due(MODEL, 0.0, 40_000, 0)
    assert SHARING.due(MODEL, 0.0, 300, 0) < long_one
    assert SHARING.due(MODEL, 5.0, 300, 0) < long_one
    assert SHARING.due(MODEL, 60.0, 300, 0) > long_one, "or it would never end"
    assert SHARING.due(MODEL, 0.0, 10_000, 30_000) < long_one, "what is computed counts"


@given(st.integers(5_000, 60_000), st.integers(500, 8_192))
def test_no_other_chunk_size_computes_a_long_prompt_faster(prompt: int, other: int) -> None:
    def seconds(chunk: int) -> float:
        parts = [(min(chunk, prompt - at), at) for at in range(0, prompt, chunk)]
        return sum(MODEL.seconds(BatchWork.of([part])) for part in parts)

    last = MODEL.seconds(BatchWork())  # a few tokens may be left for an iteration of their own
    assert seconds(SHARING.chunk(MODEL, 8_192)) <= 1.05 * seconds(other) + last


def test_chunks_are_bounded_and_are_largest_where_attention_is_causal() -> None:
    causal = LatencyModel(1e-5, 1e-9, 2e-8, 0.012, per_before=1e-9)
    assert PromptSharing.chunk(causal, 8_192) == 8_192
    assert PromptSharing.chunk(LatencyModel(1e-5, 1.0, 0.0, 1e-6), 8_192) == LEAST_CHUNK
    assert PromptSharing.chunk(MODEL, 1_000) == 1_000
