"""LangChain: invoke, stream and structured output of ChatOpenAI."""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(
    base_url=os.environ.get("SPECREJ_URL", "http://127.0.0.1:8000/v1"),
    api_key="none",
    model="SmolLM2-135M-Instruct",
    max_tokens=48,
    extra_body={"specrej": {"n": 32}},
)

answer = model.invoke("Name three uses of a brick.")
assert answer.content
print("answer:", answer.content)
print("tokens:", answer.usage_metadata["output_tokens"])

text = "".join(chunk.content for chunk in model.stream("Name three uses of a brick."))
assert text
print("streamed:", text)


class Brick(BaseModel):
    color: str = Field(max_length=20)
    weight_kg: int = Field(ge=0, le=99)


# The default method of with_structured_output, "json_schema", needs no tools.
brick = model.with_structured_output(Brick, method="json_schema").invoke("Describe a brick.")
assert isinstance(brick, Brick)
print("parsed:", brick)
