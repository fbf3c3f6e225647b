"""OpenAI Agents SDK: an agent with four tools, over /v1/responses, its default."""

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from tasks import MODEL, URL, add, check, find, mail, weather

set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=URL, api_key="none"))
agent = Agent(
    name="agent",
    model=MODEL,
    model_settings=ModelSettings(max_tokens=256),
    tools=[function_tool(tool) for tool in (weather, add, find, mail)],
)

check(lambda task: Runner.run_sync(agent, task["question"]).final_output)
