"""Generated tokens replace only the tokens of the same text in the next prompt."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from workers.engine.exact_tokens import (
    TURN_BYTES,
    ExactTokens,
    Place,
    RememberedTurn,
    RememberedTurns,
    Vocabulary,
    agreeing,
    vocabulary_of_engine,
)

END = 256  # a special token
PAIRS = [bytes((one, other)) for one in b"abc \xe2\x82" for other in b"abc \xe2\x82\xac"]
SAYS: list[bytes | None] = [*(bytes((n,)) for n in range(256)), None, *PAIRS]
VOCABULARY = Vocabulary(SAYS)
NUMBERS = {said: token for token, said in enumerate(SAYS) if said is not None}
TEXT = ("a", "b", "c", " ", "€", "ab c", "")


def tokens(text: bytes, random: Random) -> list[int]:
    """Tokenize a text in one of several possible ways, chosen at random."""
    said, at = [], 0
    while at < len(text):
        pair = text[at : at + 2]
        both = len(pair) == 2 and pair in NUMBERS and random.random() < 0.5
        said.append(NUMBERS[pair] if both else text[at])
        at += 2 if both else 1
    return said


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_prefix_with_equal_text_is_found(seed: int) -> None:
    random = Random(seed)
    turns = ["".join(random.choices(TEXT, k=random.randrange(12))).encode() for _ in range(3)]

    def row(texts: list[bytes]) -> list[int]:
        return [token for text in texts for token in (*tokens(text, random), END)]

    known, rendered = row(turns[:2])[: random.choice((-1, 10_000))], row(turns)
    if random.random() < 0.3:
        rendered[random.randrange(len(rendered))] = ord("z")
    place = agreeing(known, rendered, Place(0, 0), VOCABULARY)
    both = [
        Place(i, j)
        for i in range(len(known) + 1)
        for j in range(len(rendered) + 1)
        if whole(known[:i]) and whole(rendered[:j]) and said(known[:i]) == said(rendered[:j])
    ]
    assert place == max(both)


def said(row: Sequence[int]) -> list[bytes | int]:
    parts: list[bytes | int] = [b""]
    for token in row:
        if token == END:
            parts += [END, b""]
        else:
            parts[-1] += SAYS[token]  # type: ignore[operator]
    return parts


def whole(row: Sequence[int]) -> bool:
    return "\ufffd" not in "".join(part.decode("utf-8", "replace") for part in said(row) if part != END)  # type: ignore[union-attr]


def test_invalid_utf_8_matches_what_a_client_sends_back() -> None:
    known = [ord("a"), 0xFF, ord("b"), END]
    rendered = [ord("a"), *"\ufffd".encode(), ord("b"), END, ord("c")]
    assert agreeing(known, rendered, Place(0, 0), VOCABULARY) == Place(4, 6)


def test_a_special_token_is_not_the_text_that_looks_like_it() -> None:
    assert agreeing([END], list(b"<|end|>"), Place(0, 0), VOCABULARY) == Place(0, 0)


def test_every_answer_of_many_turns_keeps_its_generated_tokens() -> None:
    random, said_so_far, last, place = Random(1), [], None, Place(0, 0)
    for _ in range(12):
        said_so_far.append("".join(random.choices(TEXT, k=9)))
        rendered = array("i")
        for number, text in enumerate(said_so_far):  # the same way each time
            rendered.extend([*tokens(text.encode(), Random(number)), END])
        computed = rendered
        if last is not None:
            place = last.continued(rendered, last.equal(rendered), VOCABULARY)
            assert place.known == len(last.tokens)
            computed = last.tokens[: place.known] + rendered[place.rendered :]
        said_so_far.append("".join(random.choices(TEXT, k=20)))
        answer = array("i", [*tokens(said_so_far[-1].encode(), random), END])
        last = RememberedTurn(rendered, computed + answer, place)
        assert [part.decode() for part in said(last.tokens)[:-1:2]] == said_so_far  # type: ignore[union-attr]


def test_the_least_recently_used_conversations_are_forgotten() -> None:
    kept = RememberedTurns(most_bytes=2 * (TURN_BYTES + 4 * 50))
    for name in "abc":
        kept.put(name, RememberedTurn(array("i", range(10)), array("i", range(30)), Place(0, 0)))
    kept.put("b", RememberedTurn(array("i", range(10)), array("i", range(30)), Place(0, 0)))
    assert [name for name in "abc" if kept.get(name) is not None] == ["b", "c"]


class Llm:
    """Engine that generates given tokens and records the prompts that it receives."""

    model_config = SimpleNamespace(max_model_len=1_000)

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        self.given.append(prompt["prompt_token_ids"])
        for token in params.answer:
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])


@pytest.fixture
def llm() -> Llm:
    return Llm()


@pytest.fixture
def exact() -> ExactTokens:
    return ExactTokens(lambda llm: VOCABULARY)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"conserve_prefix_exact_{name}_total", labels) or 0.0


async def turn(
    exact: ExactTokens,
    llm: Llm,
    prompt: list[int],
    answer: list[int],
    text: str | None = "text",
    request: str = "request",
    session: str = "k/c-1",
    **more: Any,
) -> list[int]:
    params = SimpleNamespace(answer=answer, output_kind=SimpleNamespace(name="DELTA"), extra_args=None)
    for name, value in more.items():
        setattr(params, name, value)
    given = {"type": "token", "prompt_token_ids": prompt, "prompt": text}
    async for _ in exact.generate(Llm.generate, llm, given, params, request, session_id=session):
        pass
    return llm.given[-1]


async def test_a_caller_may_pass_every_parameter_of_generate_by_name(llm: Llm, exact: ExactTokens) -> None:
    """Pass every parameter by name, as vLLM's realtime API does."""
    params = SimpleNamespace(answer=[1], output_kind=SimpleNamespace(name="DELTA"), extra_args=None)
    given = {"prompt": {"prompt_token_ids": [7]}, "sampling_params": params, "request_id": "request"}
    async for _ in exact.generate(Llm.generate, llm, **given):
        pass
    assert llm.given == [[7]]


AB = NUMBERS[b"ab"]
Q, A = [ord("c"), END], [ord("a"), ord("b"), END]  # the answer's text tokenises to AB
NEXT = [*Q, AB, END, ord("c"), END]


async def test_a_turn_begins_with_the_tokens_that_the_previous_one_generated(
    llm: Llm, exact: ExactTokens
) -> None:
    before = counted("tokens")
    assert await turn(exact, llm, Q, A) == Q
    assert await turn(exact, llm, NEXT, [ord("b"), END]) == [*Q, *A, ord("c"), END]
    third = [*NEXT, ord("b"), END, ord("a")]
    assert await turn(exact, llm, third, []) == [*Q, *A, ord("c"), END, ord("b"), END, ord("a")]
    assert await turn(exact, llm, third, []) == [*Q, *A, ord("c"), END, ord("b"), END, ord("a")]  # a retry
    assert counted("tokens") - before == len(A)  # once, by the second


async def test_edited_text_is_tokenized_anew(llm: Llm, exact: ExactTokens) -> None:
    await turn(exact, llm, Q, A)
    edited = [*Q, NUMBERS[b"ac"], END, ord("c")]
    assert await turn(exact, llm, edited, []) == edited


async def test_a_prompt_stays_unchanged_if_given_as_token_ids_or_with_several_answers_or_prompt_logprobs(
    llm: Llm, exact: ExactTokens
) -> None:
    await turn(exact, llm, Q, A)
    assert await turn(exact, llm, NEXT, [], text=None) == NEXT
    assert await turn(exact, llm, NEXT, [], n=2) == NEXT
    assert await turn(exact, llm, NEXT, [], prompt_logprobs=1) == NEXT


async def test_a_turn_succeeds_although_the_tokenizer_raises(llm: Llm) -> None:
    class Broken:
        def get_tokenizer(self) -> Any:
            raise KeyError("vocab")

    exact = ExactTokens(lambda _llm: vocabulary_of_engine(Broken()))
    before = counted("fallbacks", cause="no_vocabulary")
    await turn(exact, llm, Q, A)
    assert await turn(exact, llm, NEXT, []) == NEXT
    assert counted("fallbacks", cause="no_vocabulary") == before + 1


async def test_the_prompt_of_a_turn_through_a_prefiller_is_tokenized_from_its_text(
    llm: Llm, exact: ExactTokens
) -> None:
    before = counted("fallbacks", cause="transferred")
    await turn(exact, llm, Q, A)
    pulled = {"kv_transfer_params": {"do_remote_prefill": True}}
    assert await turn(exact, llm, NEXT, [], extra_args=pulled) == NEXT
    assert counted("fallbacks", cause="transferred") == before + 1
    leg = {"kv_transfer_params": {"do_remote_decode": True}}
    await turn(exact, llm, [1], [2], extra_args=leg)  # a prefill leg changes no remembered turn
    assert await turn(exact, llm, [*NEXT, ord("a")], []) == [*NEXT, ord("a")]


async def test_the_prompt_of_a_turn_that_would_exceed_the_context_is_tokenized_from_its_text(
    llm: Llm, exact: ExactTokens
) -> None:
    before = counted("fallbacks", cause="too_long")
    llm.model_config = SimpleNamespace(max_model_len=len(NEXT) + 1)
    await turn(exact, llm, Q, A)
    assert await turn(exact, llm, NEXT, []) == NEXT
    assert counted("fallbacks", cause="too_long") == before + 1


async def test_prompts_stay_unchanged_if_the_bytes_of_tokens_are_unknown(llm: Llm) -> None:
    exact = ExactTokens(lambda llm: None)
    await turn(exact, llm, Q, A)
    assert await turn(exact, llm, NEXT, []) == NEXT


async def test_tokens_sent_before_a_client_disconnected_are_remembered(llm: Llm, exact: ExactTokens) -> None:
    params = SimpleNamespace(answer=A, output_kind=SimpleNamespace(name="DELTA"), extra_args=None)
    given = {"type": "token", "prompt_token_ids": Q, "prompt": "text"}
    outputs = exact.generate(Llm.generate, llm, given, params, "request", session_id="k/c-1")
    await anext(outputs)
    await anext(outputs)
    await outputs.aclose()
    assert await turn(exact, llm, NEXT, []) == [*Q, *A[:2], *NEXT[3:]]
    await asyncio.sleep(0)


def leg(kind: str, **more: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {kind: True, "moves": True, **more}}


async def test_a_conversation_that_moves_takes_its_tokens_along(llm: Llm, exact: ExactTokens) -> None:
    new, moved = ExactTokens(lambda llm: VOCABULARY), [*Q, *A, ord("c"), END]
    await turn(exact, llm, Q, A)
    assert await turn(exact, llm, NEXT, [0], extra_args=leg("do_remote_decode")) == moved
    fetch = leg("do_remote_prefill", prompt_token_ids=moved)
    assert await turn(new, llm, NEXT, A, extra_args=fetch) == moved
    assert fetch == leg("do_remote_prefill"), "the engine's core needs no second copy"
    assert await turn(new, llm, [*NEXT, AB, END, ord("c")], []) == [*moved, *A, ord("c")]
    assert await turn(exact, llm, NEXT, []) == moved, "the former engine remembers its last turn"


async def test_an_idle_conversation_continues_with_its_tokens_after_a_move(
    llm: Llm, exact: ExactTokens
) -> None:
    sent = [*Q, *A]
    await turn(exact, llm, sent, [0], text=None, extra_args=leg("do_remote_prefill"))
    assert await turn(exact, llm, NEXT, []) == [*sent, ord("c"), END]
