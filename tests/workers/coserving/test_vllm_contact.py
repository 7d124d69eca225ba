"""Another vLLM than the one this was written for is refused with a sentence, before it can misbehave."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from workers.coserving import vllm_contact as contact


def test_the_installed_release_is_the_one_written_for() -> None:
    contact.verify()


@pytest.mark.parametrize("release", ["0.31.4", "0.33.0", "1.0.0", "0.320.0"])
def test_another_release_is_refused(release: str) -> None:
    with pytest.raises(contact.UnsupportedEngineError, match=r"install vllm==0\.32\.0"):
        contact.verify(release)


@pytest.mark.parametrize("entry", contact._SIGNATURES, ids=lambda entry: f"{entry[0].__name__}.{entry[1]}")
def test_a_changed_signature_is_refused(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, _ = entry
    monkeypatch.setattr(owner, name, lambda self, something_else: None)
    with pytest.raises(contact.UnsupportedEngineError, match=rf"relies on {owner.__name__}\.{name}"):
        contact.verify()


def test_a_method_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(contact.EngineCore, "preprocess_add_request")
    with pytest.raises(contact.UnsupportedEngineError, match="preprocess_add_request"):
        contact.verify()


def test_two_wrappers_of_the_forward_pass_compose() -> None:
    runner: Any = SimpleNamespace(_model_forward=lambda: ["model"])

    def named(name: str) -> Any:
        return lambda forward: lambda: [name, *forward(), name]

    contact.wrap_forward(runner, named("inner"))
    contact.wrap_forward(runner, named("outer"))
    assert runner._model_forward() == ["outer", "inner", "model", "inner", "outer"]
