"""Instructor: the arguments of each call as an object, by its default mode, a tool of that name."""

from typing import Any, get_type_hints

import instructor
from openai import OpenAI
from pydantic import create_model
from tasks import MODEL, URL, Task, add, check, find, mail, weather

TOOLS = {tool.__name__: tool for tool in (weather, add, find, mail)}
client = instructor.from_openai(OpenAI(base_url=URL, api_key="none"))


def answer_of(task: Task) -> str:
    turns = [{"role": "user", "content": task["question"]}]
    ask = {"model": MODEL, "max_tokens": 256, "messages": turns}
    for name in (call["name"] for call in task["calls"]):
        hints = get_type_hints(TOOLS[name]).items()
        fields: Any = {key: (hint, ...) for key, hint in hints if key != "return"}
        model = create_model(name, **fields)
        arguments, answer = client.create_with_completion(response_model=model, **ask)
        message = answer.choices[0].message
        result = TOOLS[name](**arguments.model_dump())
        tool_call_id = message.tool_calls[0].id
        turns += [
            message.model_dump(),
            {"role": "tool", "tool_call_id": tool_call_id, "content": result},
        ]
    return str(client.create(response_model=None, **ask).choices[0].message.content)


check(answer_of)
