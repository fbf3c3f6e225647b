"""Pydantic AI: an agent whose output is an object, by its default mode, a tool for the output."""

import json

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from tasks import MODEL, URL, Task, add, check, find, mail, weather


class Output(BaseModel):
    text: str


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
agent = Agent(model, output_type=Output, tools=[weather, add, find, mail])


def answer_of(task: Task) -> str:
    output = json.dumps({"text": task["answer"]})
    question = f"{task['question']} then call final_result {output}"
    return str(agent.run_sync(question, model_settings={"max_tokens": 256}).output.text)


check(answer_of)
