"""DSPy: a signature whose fields are the object of a schema, the best of many."""

import os

import dspy
import litellm

MODEL = "SmolLM2-135M-Instruct:sr-32"
# DSPy asks LiteLLM whether a model has structured output; it knows no model of a private server.
litellm.register_model(
    {MODEL: {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}}
)
dspy.configure(
    lm=dspy.LM(
        f"openai/{MODEL}",
        api_base=os.environ.get("SPECREJ_URL", "http://127.0.0.1:8000/v1"),
        api_key="none",
        engine="litellm",
        max_tokens=256,
        cache=False,
    ),
    adapter=dspy.JSONAdapter(),
)

answer = dspy.Predict("question -> use: str, weight_kg: int")(question="Name a use of a brick.")
assert isinstance(answer.weight_kg, int)
print("use:", answer.use)
