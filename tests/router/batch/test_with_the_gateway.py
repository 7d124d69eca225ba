"""The real gateway with a real directory: the Batch API behind its keys, beside conversations, and flex."""

from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from router.batch.config import BatchConfig
from tests.router.batch.gateway import FAST
from tests.router.batch.jobs import ended, jsonl, line, lines_of, submit
from tests.support.fake_fleet import MODEL, fleet


async def test_batches_beside_conversations(tmp_path: Path) -> None:
    batch_config = BatchConfig(f"sqlite:///{tmp_path}/batch.db", str(tmp_path / "files"), dispatch=FAST)
    async with fleet(tmp_path, batch=batch_config, api_keys=("sk-one", "sk-two")) as small:
        (url,) = small.urls
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-one", max_retries=0) as one,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-two", max_retries=0) as two,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-none", max_retries=0) as stranger,
        ):
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            lines = [line(f"r{i}", body=ask) for i in range(40)]
            batch = await submit(one, jsonl(lines))
            answer = await one.chat.completions.create(**ask)  # type: ignore[call-overload]
            assert answer.choices[0].message.content
            flex = await two.chat.completions.create(**ask, service_tier="flex")  # type: ignore[call-overload]
            assert flex.choices[0].message.content
            batch = await ended(one, batch)
            assert batch.status == "completed" and len(await lines_of(one, batch.output_file_id)) == 40
            with pytest.raises(openai.NotFoundError):
                await two.batches.retrieve(batch.id)
            with pytest.raises(openai.AuthenticationError):
                await stranger.batches.list()
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.create(file=("a", b"{}"), purpose="batch")
        seen = [one for engine in small.engines.values() for one in engine.seen]
        offline = [one for one in seen if one.body.get("priority")]
        assert len(offline) == 41  # the batch and flex
        assert all("kv_transfer_params" not in one.body for one in offline)
        assert not any(one.body.get("priority") for one in small.prefills())
