"""Generators on other engines: vLLM in this process, or an endpoint with OpenAI's API."""
