"""Pydantic AI: an agent whose output is an object, by the server's structured output."""

import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ.get("SPECREJ_URL", "http://127.0.0.1:8000/v1")
model = OpenAIChatModel(
    "SmolLM2-135M-Instruct:sr-32", provider=OpenAIProvider(base_url=URL, api_key="none")
)


class Brick(BaseModel):
    color: str = Field(max_length=20)
    weight_kg: int = Field(ge=0, le=99)


answer = Agent(model).run_sync("Name three uses of a brick.", model_settings={"max_tokens": 48})
assert answer.output
print("answer:", answer.output)

agent = Agent(model, output_type=NativeOutput(Brick))
brick = agent.run_sync("Describe a brick.", model_settings={"max_tokens": 96}).output
assert isinstance(brick, Brick)
print("parsed:", brick)
