// The official client for Node against a gateway at GATEWAY_URL whose answers have reasoning, text and two calls.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.GATEWAY_URL}/v1`, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tool = { type: "function", function: { name: "weather", parameters } };
const chat = { model: "toy", messages: [{ role: "user", content: "How is the weather?" }], tools: [tool] };
const items = { model: "toy", input: "How is the weather?", tools: [{ type: "function", name: "weather", parameters }] };
const cities = ['{"city":"Oslo"}', '{"city":"Rome"}'];

test("calls of a chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create(chat);
  const streamed = await client.chat.completions.stream(chat).finalChatCompletion();
  for (const { choices: [{ message, finish_reason }] } of [whole, streamed]) {
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.content, "Let me see.");
    assert.deepEqual(message.tool_calls.map((call) => call.function.arguments), cities);
  }
});

test("calls of a response, whole and streamed", async () => {
  const whole = await client.responses.create(items);
  const streamed = await client.responses.stream(items).finalResponse();
  for (const { output, output_text } of [whole, streamed]) {
    assert.equal(output_text, "Let me see.");
    assert.deepEqual(output.map((item) => item.type), ["reasoning", "message", "function_call", "function_call"]);
    assert.deepEqual(output.slice(2).map((item) => item.arguments), cities);
  }
});
