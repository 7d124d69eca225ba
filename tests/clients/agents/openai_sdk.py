"""Tool loop written by hand with the OpenAI SDK."""

import json

import common
from openai import OpenAI

url, model = common.endpoint()
client = OpenAI(base_url=url, api_key="openai-sdk")
messages: list = [{"role": "system", "content": common.SYSTEM}, {"role": "user", "content": common.TASK}]
for _ in range(common.TURNS):
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[common.TOOL], tool_choice=common.FORCED, max_tokens=128
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": common.weather(**arguments)})
common.report(common.TURNS)
