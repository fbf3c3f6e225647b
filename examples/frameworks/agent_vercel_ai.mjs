// Vercel AI SDK: an agent with four tools, streamed.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.SPECREJ_URL ?? "http://127.0.0.1:8000/v1";
const model = createOpenAICompatible({ name: "specrej", baseURL })("toy:sr-32");
const tasks = JSON.parse(readFileSync(new URL("tasks.json", import.meta.url)));
const schemas = {
  weather: z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) }),
  add: z.object({ a: z.number().int(), b: z.number().int() }),
  find: z.object({ words: z.array(z.string()), limit: z.number().int() }),
  mail: z.object({ to: z.string(), urgent: z.boolean() }),
};

for (const task of tasks) {
  const calls = [];
  const execute = (name) => (args) => task.results[calls.push({ name, arguments: args }) - 1];
  const tools = Object.fromEntries(
    Object.entries(schemas).map(([name, inputSchema]) => [
      name,
      tool({ description: name, inputSchema, execute: execute(name) }),
    ]),
  );
  let text = "";
  const request = { model, tools, prompt: task.question, maxOutputTokens: 256 };
  for await (const part of streamText({ ...request, stopWhen: stepCountIs(5) }).fullStream) {
    if (part.type === "text-start") text = "";
    if (part.type === "text-delta") text += part.text;
  }
  assert.deepStrictEqual({ calls, answer: text }, { calls: task.calls, answer: task.answer });
}
console.log(`${tasks.length} of ${tasks.length} tasks`);
