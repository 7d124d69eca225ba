"""A batch of offline requests. It uses the capacity that agents' turns leave on the decoders, and yields to
them.
"""

import io
import json
import os
import time

from openai import OpenAI

URL = os.environ.get("CONSERVE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("CONSERVE_API_KEY", "anything"))
model = client.models.list().data[0].id

lines = [
    {
        "custom_id": f"word-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "max_tokens": 20,
            "messages": [{"role": "user", "content": f"Use the word {word!r} in a sentence."}],
        },
    }
    for number, word in enumerate(("river", "engine", "window", "garden"))
]
content = io.BytesIO("\n".join(json.dumps(line) for line in lines).encode())
file = client.files.create(file=("words.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(1)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)
if batch.output_file_id:
    for line in client.files.content(batch.output_file_id).text.splitlines():
        result = json.loads(line)
        print(result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"])
