"""openai-python: an answer, a stream with progress, and an object of a schema."""

import os

from openai import OpenAI
from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct:sr-32"
client = OpenAI(base_url=os.environ.get("SPECREJ_URL", "http://127.0.0.1:8000/v1"), api_key="none")
question = {"role": "user", "content": "Name three uses of a brick."}

answer = client.chat.completions.create(model=MODEL, max_tokens=48, messages=[question])
assert answer.choices[0].message.content
print("answer:", answer.choices[0].message.content)

# Progress comes as reasoning_content, the text as soon as it is certain.
text = ""
for chunk in client.chat.completions.create(
    model=MODEL, max_tokens=48, messages=[question], stream=True
):
    delta = chunk.choices[0].delta
    print(getattr(delta, "reasoning_content", None) or "", end="")
    text += delta.content or ""
assert text
print("streamed:", text)


class Use(BaseModel):
    material: str = Field(max_length=20)
    weight_kg: int = Field(ge=0, le=99)


parsed = client.chat.completions.parse(
    model=MODEL,
    max_tokens=64,
    messages=[{"role": "user", "content": "Describe a brick."}],
    response_format=Use,
)
assert isinstance(parsed.choices[0].message.parsed, Use)
print("parsed:", parsed.choices[0].message.parsed)
