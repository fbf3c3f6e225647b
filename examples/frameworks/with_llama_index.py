"""LlamaIndex: chat, and a stream, of OpenAILike."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    api_base=os.environ.get("SPECREJ_URL", "http://127.0.0.1:8000/v1"),
    api_key="none",
    model="SmolLM2-135M-Instruct:sr-32",
    is_chat_model=True,
    max_tokens=48,
)
messages = [ChatMessage(role="user", content="Name three uses of a brick.")]

answer = model.chat(messages)
assert answer.message.content
print("answer:", answer.message.content)

text = "".join(part.delta or "" for part in model.stream_chat(messages))
assert text
print("streamed:", text)
