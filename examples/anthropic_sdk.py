"""Two turns of a conversation with Anthropic's SDK: pip install anthropic"""

import os

from anthropic import Anthropic

URL = os.environ.get("CONSERVE_URL", "http://127.0.0.1:8000")
client = Anthropic(base_url=URL, api_key=os.environ.get("CONSERVE_API_KEY", "anything"))
model = client.models.list().data[0].id

messages = []
for question in ("What is the capital of France?", "And of Italy?"):
    messages.append({"role": "user", "content": question})
    with client.messages.stream(model=model, messages=messages, max_tokens=60) as stream:
        print(f"\n> {question}")
        for text in stream.text_stream:
            print(text, end="", flush=True)
        messages.append({"role": "assistant", "content": stream.get_final_text()})
print()
