"""LiteLLM: the providers openai/ and hosted_vllm/; the latter passes top_k and min_p on."""

import os

import litellm

URL = os.environ.get("SPECREJ_URL", "http://127.0.0.1:8000/v1")
MODEL = "SmolLM2-135M-Instruct:sr-32"
messages = [{"role": "user", "content": "Name three uses of a brick."}]

for provider, options in (("openai", {}), ("hosted_vllm", {"top_k": 40, "min_p": 0.05})):
    answer = litellm.completion(
        f"{provider}/{MODEL}",
        messages=messages,
        api_base=URL,
        api_key="none",
        max_tokens=48,
        **options,
    )
    assert answer.choices[0].message.content
    print(f"{provider}:", answer.choices[0].message.content)

stream = litellm.completion(
    f"openai/{MODEL}", messages=messages, api_base=URL, api_key="none", max_tokens=48, stream=True
)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert text
print("streamed:", text)
