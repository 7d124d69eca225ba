"""The connector reads a model's KV cache groups, and derives how much of a prompt is transferred."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

from kvtransfer.compat.cache_groups import groups_of
from kvtransfer.config import ConnectorConfigError
from kvtransfer.retention.retained_conversations import STATE_WINDOW, CacheGroup, transferred_tokens

FULL, WINDOW = CacheGroup(("a",), 32, 64), CacheGroup(("b",), 32, 64, window=63)
STATE = CacheGroup(("c",), 32, 64, STATE_WINDOW, state=True)


def of_states(mode: str) -> KVCacheGroupSpec:
    spec = MambaSpec(block_size=32, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    return KVCacheGroupSpec(["c"], spec)


def of_attention() -> KVCacheGroupSpec:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheGroupSpec(["a"], spec)


def test_a_group_of_states_needs_only_the_last_block() -> None:
    full, state = groups_of(SimpleNamespace(kv_cache_groups=[of_attention(), of_states("align")]))
    assert not full.state and state.state
    assert [state.first_block(tokens) for tokens in (0, 1, 31, 32, 33, 64, 65)] == [0, 0, 0, 0, 1, 1, 2]
    assert [state.first_kept(blocks) for blocks in (0, 1, 2, 9)] == [0, 0, 1, 8]


@pytest.mark.parametrize("mode", ["none", "align"])
def test_models_without_attention_or_with_recurrent_states_that_are_not_kept_are_refused(mode: str) -> None:
    groups = [of_states(mode)] if mode == "align" else [of_attention(), of_states(mode)]
    said = "no layer of this model has attention" if mode == "align" else "--enable-prefix-caching"
    with pytest.raises(ConnectorConfigError, match=said):
        groups_of(SimpleNamespace(kv_cache_groups=groups))


def test_the_last_token_and_tokens_after_the_last_state_are_not_sent() -> None:
    prompts = (1, 32, 33, 64, 65, 94)
    assert [transferred_tokens([FULL], prompt) for prompt in prompts] == list(prompts)
    assert [transferred_tokens([FULL, WINDOW], prompt) for prompt in prompts] == [1, 32, 33, 64, 65, 93]
    assert [transferred_tokens([FULL, STATE], prompt) for prompt in prompts] == [0, 0, 32, 32, 64, 64]
