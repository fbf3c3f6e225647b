// The official client for Node against a gateway at GATEWAY_URL; tests/gateway/test_openai_node.py runs it.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.GATEWAY_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three uses of a brick." }];
const request = { model: "toy", messages, max_tokens: 40, seed: 5, specrej: { n: 4, ignore_eos: true } };

test("an answer", async () => {
  const answer = await client.chat.completions.create(request);
  assert.equal(answer.object, "chat.completion");
  assert.ok(answer.choices[0].message.content);
  assert.equal(answer.usage.completion_tokens, 40);
  assert.equal(answer._request_id, answer.specrej.request_id);
});

test("a stream has the same answer", async () => {
  const whole = await client.chat.completions.create(request);
  const stream = await client.chat.completions.create({
    ...request, stream: true, stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(usage, whole.usage);
});

test("raw text", async () => {
  const answer = await client.completions.create({ model: "toy", prompt: "Once", max_tokens: 8 });
  assert.ok(answer.choices[0].text);
});

test("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes("toy:bon-32"));
});

test("errors name the caller's field", async () => {
  await assert.rejects(client.chat.completions.create({ ...request, functions: [{}] }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "functions");
    return true;
  });
  await assert.rejects(
    client.chat.completions.create({ ...request, model: "gpt-4o" }), OpenAI.NotFoundError,
  );
});

test("a failure in mid-stream is an exception", async () => {
  const specrej = { ...request.specrej, timeout_s: 2 }; // the stream begins before it ends
  const stream = await client.chat.completions.create({
    ...request, max_tokens: 1500, stream: true, specrej,
  });
  await assert.rejects(
    async () => { for await (const _ of stream); },
    (error) => error instanceof OpenAI.APIError && error.code === "deadline_exceeded",
  );
});

test("a client that aborts ends its request", async () => {
  const controller = new AbortController();
  const stream = await client.chat.completions.create(
    { ...request, max_tokens: 1500, stream: true }, { signal: controller.signal },
  );
  for await (const _ of stream) controller.abort();
});
