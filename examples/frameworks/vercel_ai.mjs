// Vercel AI SDK: text, a stream with progress as reasoning, and an object of a schema.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "specrej",
  baseURL: process.env.SPECREJ_URL ?? "http://127.0.0.1:8000/v1",
  supportsStructuredOutputs: true,
});
const model = provider("SmolLM2-135M-Instruct:sr-32");
const request = { model, maxOutputTokens: 48, prompt: "Name three uses of a brick." };

const { text } = await generateText(request);
assert(text);
console.log("answer:", text);

let [reasoning, streamed] = ["", ""];
for await (const part of streamText(request).fullStream) {
  if (part.type === "reasoning-delta") reasoning += part.text;
  if (part.type === "text-delta") streamed += part.text;
}
assert(streamed);
console.log(reasoning + "streamed:", streamed);

const schema = z.object({ color: z.string().max(20), weightKg: z.number().int() });
const { output } = await generateText({
  ...request,
  maxOutputTokens: 96,
  prompt: "Describe a brick.",
  output: Output.object({ schema }),
});
assert(typeof output.color === "string");
console.log("parsed:", output);
