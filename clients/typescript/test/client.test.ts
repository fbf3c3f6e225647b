// The client on all services with toys at SPECREJ_ADDRESS; tests/clients starts both.
import assert from "node:assert/strict";
import { after, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { create } from "@bufbuild/protobuf";
import { createValidator } from "@bufbuild/protovalidate";
import {
  CacheControl,
  Client,
  Code,
  ConnectError,
  FinishReason,
  GenerateRequestSchema,
  reason,
  violations,
  type Request,
} from "specrej";

const client = new Client({ address: process.env.SPECREJ_ADDRESS });
after(() => client.close());

const prompt = { messages: [{ role: "user", content: "Name three uses of a brick." }] };
const selection = { n: 4 };
const sampling = { maxTokens: 40, seed: 5n, ignoreEos: true };
const request: Request = { prompt, selection, sampling };
// Not from the cache, whose answers have no rounds.
const cacheControl = CacheControl.BYPASS;
const fresh: Request = { ...request, cacheControl };
const long: Request = { ...fresh, sampling: { ...sampling, maxTokens: 4000 } };

/** Waits until the server runs no request. */
async function untilIdle(): Promise<void> {
  while ((await client.service.describe({})).running) await sleep(50);
}

test("an answer", async () => {
  const answer = await client.generate(request);
  assert.ok(answer.text);
  assert.equal(answer.finishReason, FinishReason.LENGTH);
  assert.equal(answer.usage?.answerTokens, 40);
  assert.deepEqual(answer.rounds.map(({ number }) => number), [1, 2, 3]);
});

test("a stream has events, and the same answer", async () => {
  const events = [];
  for await (const event of client.stream(fresh, { textDeltas: true })) events.push(event);
  const cases = events.map((event) => event.case);
  assert.equal(cases[0], "admitted");
  assert.equal(cases.filter((name) => name === "roundCompleted").length, 3);
  const last = events.at(-1);
  assert.ok(last?.case === "finished");
  const deltas = events.map((event) => (event.case === "textDelta" ? event.value.text : ""));
  assert.equal(deltas.join(""), last.value.text);
  assert.equal(last.value.text, (await client.generate(request)).text);
});

const wrong: Request = { ...request, sampling: { topP: 2, maxTokens: -1 } };

test("an error has the paths of all fields", async () => {
  await assert.rejects(client.generate(wrong), (error) => {
    assert.equal(ConnectError.from(error).code, Code.InvalidArgument);
    assert.ok(reason(error));
    const fields = violations(error).map(({ field }) => field);
    assert.deepEqual(fields.sort(), ["sampling.max_tokens", "sampling.top_p"]);
    assert.ok(violations(error).every(({ description }) => description));
    return true;
  });
});

test("the schema's rules find the same fields before a request is sent", () => {
  const message = create(GenerateRequestSchema, wrong);
  const { violations } = createValidator().validate(GenerateRequestSchema, message);
  const found = violations?.map(String).join() ?? "";
  assert.match(found, /sampling\.max_tokens.*sampling\.top_p/);
});

test("leaving a stream cancels its call", { timeout: 60_000 }, async () => {
  for await (const event of client.stream(long)) if (event.case === "roundCompleted") break;
  await untilIdle();
});

test("a signal cancels a call", { timeout: 60_000 }, async () => {
  const controller = new AbortController();
  await assert.rejects(
    async () => {
      for await (const _ of client.stream(long, { signal: controller.signal })) controller.abort();
    },
    (error) => ConnectError.from(error).code === Code.Canceled,
  );
  await untilIdle();
});

test("closing the client cancels its calls", async () => {
  const other = new Client({ address: process.env.SPECREJ_ADDRESS });
  await assert.rejects(
    async () => {
      for await (const _ of other.stream(long)) other.close();
    },
    (error) => ConnectError.from(error).code === Code.Canceled,
  );
});

test("a deadline ends a call", async () => {
  await assert.rejects(
    client.generate(long, { timeoutMs: 300 }),
    (error) => ConnectError.from(error).code === Code.DeadlineExceeded,
  );
});
