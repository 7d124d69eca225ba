"""Announce how long a tool will take, so the fleet parks the KV on the host and prefetches it in time."""

import os
import time

from openai import OpenAI

URL = os.environ.get("CONSERVE_URL", "http://127.0.0.1:8000")
TOOL_S = float(os.environ.get("TOOL_SECONDS", "20"))  # a test suite, say
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("CONSERVE_API_KEY", "anything"))
model = client.models.list().data[0].id

messages = [
    {"role": "user", "content": "Here is my project.\n" + "def f(x): return x\n" * 300 + "\nRun its tests."}
]
first = client.chat.completions.with_raw_response.create(
    model=model, messages=messages, max_tokens=40, extra_headers={"X-Conversation-Away": str(TOOL_S)}
)
conversation = first.headers["x-conversation-id"]
messages.append({"role": "assistant", "content": first.parse().choices[0].message.content or "Running them."})

time.sleep(TOOL_S)  # the tool runs

messages.append({"role": "user", "content": "The tests say: 12 passed. What now?"})
began = time.monotonic()
stream = client.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
    extra_headers={"X-Conversation-ID": conversation},
)
for chunk in stream:
    if chunk.choices and began:
        print(f"first token after {time.monotonic() - began:.3f} s")
        began = 0.0
    if chunk.usage:
        cached = chunk.usage.prompt_tokens_details.cached_tokens if chunk.usage.prompt_tokens_details else 0
        print(f"{cached} of {chunk.usage.prompt_tokens} prompt tokens were not computed again")
