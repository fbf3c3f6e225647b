"""LangChain: an agent of `create_agent` with four tools."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from tasks import MODEL, URL, Task, add, check, find, mail, weather

model = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_tokens=256)
agent = create_agent(model, tools=[weather, add, find, mail])


def answer_of(task: Task) -> str:
    turns = [{"role": "user", "content": task["question"]}]
    return str(agent.invoke({"messages": turns})["messages"][-1].text)


check(answer_of)
