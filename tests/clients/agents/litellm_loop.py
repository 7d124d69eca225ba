"""Tool loop that calls LiteLLM's `completion()`."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import common
import litellm

litellm.telemetry = False
url, model = common.endpoint()
messages: list = [{"role": "system", "content": common.SYSTEM}, {"role": "user", "content": common.TASK}]
for _ in range(common.TURNS):
    answer = litellm.completion(
        model=f"openai/{model}",
        api_base=url,
        api_key="litellm",
        messages=messages,
        tools=[common.TOOL],
        tool_choice=common.FORCED,
        max_tokens=128,
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": common.weather(**arguments)})
common.report(common.TURNS)
