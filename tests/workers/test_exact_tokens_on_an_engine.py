"""On a real engine, answers keep their generated tokens though their text would be tokenised differently."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from deploy.small_model import ModelShape, make_model
from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import EngineProcess, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MERGES = 512
ANSWER, TURNS, CONVERSATIONS = 100, 3, 2
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model: Path = tmp_path_factory.mktemp("model") / "drifting"
    make_model(model, ModelShape(merges=MERGES))
    exact = ("--middleware", "workers.engine.exact_tokens.ExactTokensMiddleware")
    both = ("--middleware", "workers.engine.resume.token_lines.TokenLinesMiddleware")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details")
    arguments = ("--model", str(model), *both, *exact, *tools)
    with running(EngineProcess(ConnectorConfig(), arguments=arguments)) as (one,):
        yield one


def chat(engine: EngineProcess, session: str, messages: Messages, **more: Any) -> dict[str, Any]:
    body = {
        "model": "m",
        "messages": messages,
        "max_tokens": ANSWER,
        "min_tokens": 20,
        "temperature": 1.0,
        "return_token_ids": True,
        **more,
    }
    return engine.post("/v1/chat/completions", body, **({"X_Session_ID": session} if session else {}))


def rendered(engine: EngineProcess, messages: Messages) -> list[int]:
    return list(engine.post("/tokenize", {"model": "m", "messages": messages})["tokens"])


def says(engine: EngineProcess, tokens: list[int]) -> str:
    return str(engine.post("/detokenize", {"model": "m", "tokens": tokens})["prompt"])


def test_no_token_of_an_answer_is_recomputed(engine: EngineProcess) -> None:
    lost = {"": 0, "exact": 0}
    for variant in lost:
        for number in range(CONVERSATIONS):
            messages: Messages = [{"role": "user", "content": f"question {number} of {variant!r}"}]
            had, before = 0, []
            for turn in range(TURNS):
                session = f"k/{variant}-{number}" if variant else ""
                answer = chat(engine, session, messages, seed=100 * number + turn)
                prompt, usage = answer["prompt_token_ids"], answer["usage"]
                cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                lost[variant] += max(0, had // engine.block_tokens * engine.block_tokens - cached)
                plain = rendered(engine, messages)
                assert says(engine, prompt) == says(engine, plain), "the same text"
                if variant:
                    assert prompt[: len(before)] == before
                else:
                    assert prompt == plain
                assert usage["prompt_tokens"] == len(prompt)
                choice = answer["choices"][0]
                had = usage["total_tokens"] - 1  # the last one's KV is not computed
                before = [*prompt, *choice["token_ids"]]
                messages = [
                    *messages,
                    {"role": "assistant", "content": choice["message"]["content"]},
                    {"role": "user", "content": f"and then {turn}?"},
                ]
    print(f"tokens computed again: {lost}")
    assert lost[""] > CONVERSATIONS * TURNS * ANSWER / 6, "it does drift"
    assert lost["exact"] <= 0.1 * lost[""]
    assert engine.metrics()["conserve_prefix_exact_tokens_total"] > lost[""] / 2


def test_an_edited_answer_is_recomputed(engine: EngineProcess) -> None:
    messages: Messages = [{"role": "user", "content": "edited"}]
    long = 4 * ANSWER  # about every fortieth token differs from the token of its text
    answered = chat(engine, "k/edited", messages, seed=1, min_tokens=long, max_tokens=long)
    said = answered["choices"][0]["message"]["content"]
    more = [
        *messages,
        {"role": "assistant", "content": said[:-20] + "~ edited ~" + said[-20:]},
        {"role": "user", "content": "on"},
    ]
    answer = chat(engine, "k/edited", more, max_tokens=20)
    prompt, plain = answer["prompt_token_ids"], rendered(engine, more)
    assert prompt != plain, "what was not edited is as it was generated"
    assert says(engine, prompt) == says(engine, plain)
    same = next(n for n in range(1, len(plain)) if prompt[-n:] != plain[-n:]) - 1
    assert "~ edited ~" in says(engine, plain[-same:]), "what follows is as its text tokenises"


def test_prompts_that_a_client_sends_as_token_ids_are_not_changed(engine: EngineProcess) -> None:
    first = engine.post(
        "/v1/completions",
        {"model": "m", "prompt": "once", "max_tokens": 60, "temperature": 1.0, "seed": 3, "min_tokens": 60},
        X_Session_ID="k/tokens",
    )
    text = "once" + first["choices"][0]["text"]
    tokens = engine.post("/tokenize", {"model": "m", "prompt": text})["tokens"]
    for prompt, same in ((tokens, True), (text, False)):
        body = {"model": "m", "prompt": prompt, "max_tokens": 2, "return_token_ids": True}
        answer = engine.post("/v1/completions", body, X_Session_ID="k/tokens")
        assert (answer["choices"][0]["prompt_token_ids"] == tokens) is same
