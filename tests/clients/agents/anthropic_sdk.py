"""Streamed tool loop of the Anthropic SDK, with a cache marker on the newest block as in Claude Code."""

import anthropic
import common

url, model = common.endpoint()
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="anthropic-sdk", max_retries=0)
TOOL = {"name": common.TOOL_NAME, "description": "Weather of a city.", "input_schema": common.PARAMETERS}
CACHED = {"cache_control": {"type": "ephemeral"}}
messages: list = [{"role": "user", "content": [{"type": "text", "text": common.TASK}]}]
for turn in range(common.TURNS):
    for message in messages:
        for block in message["content"]:
            block.pop("cache_control", None)
    messages[-1]["content"][-1].update(CACHED)
    with client.messages.stream(
        model=model,
        system=[
            {"type": "text", "text": f"x-anthropic-billing-header: {turn}"},
            {"type": "text", "text": common.SYSTEM},
        ],
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": common.TOOL_NAME},
        max_tokens=128,
    ) as stream:
        answer = stream.get_final_message()
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls, answer
    messages.append(
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in calls]}
    )
    results = [
        {"type": "tool_result", "tool_use_id": c.id, "content": common.weather(**c.input)} for c in calls
    ]
    messages.append({"role": "user", "content": results})
common.report(common.TURNS)
