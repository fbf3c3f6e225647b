// openai-node: an answer and a stream with progress.
import assert from "node:assert";
import OpenAI from "openai";

const baseURL = process.env.SPECREJ_URL ?? "http://127.0.0.1:8000/v1";
const client = new OpenAI({ baseURL, apiKey: "none" });
const request = {
  model: "SmolLM2-135M-Instruct:sr-32",
  max_tokens: 48,
  messages: [{ role: "user", content: "Name three uses of a brick." }],
};

const answer = await client.chat.completions.create(request);
assert(answer.choices[0].message.content);
console.log("answer:", answer.choices[0].message.content);

let text = "";
for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
  process.stdout.write(chunk.choices[0]?.delta?.reasoning_content ?? "");
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert(text);
console.log("streamed:", text);
