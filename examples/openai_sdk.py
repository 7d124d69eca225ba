"""Three turns of a conversation with OpenAI's SDK. No id is sent, and every turn runs on the same decoder."""

import os

from openai import OpenAI

URL = os.environ.get("CONSERVE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("CONSERVE_API_KEY", "anything"))
model = client.models.list().data[0].id

messages = []
for question in ("What is the capital of France?", "And of Italy?", "Which of the two is larger?"):
    messages.append({"role": "user", "content": question})
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=60,
        stream=True,
        extra_headers={"X-Conversation-Placement": "1"},  # optional: says where the turn is computed
    )
    headers = stream.response.headers
    print(f"\n> {question}   [{headers['x-conversation-id']}: {headers['x-conversation-placement']}]")
    answer = ""
    for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            answer += piece
            print(piece, end="", flush=True)
    messages.append({"role": "assistant", "content": answer})
print()
