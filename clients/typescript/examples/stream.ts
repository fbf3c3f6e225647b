// The rounds of a request, then its text. npm run build && node dist/examples/stream.js
import { Client, ConnectError, retryAfterMs, violations } from "specrej";

const client = new Client({ address: process.env.SPECREJ_ADDRESS });
try {
  const request = { prompt: { text: "Once upon a time" }, selection: { n: 16 } };
  for await (const event of client.stream(request, { textDeltas: true, timeoutMs: 60_000 })) {
    if (event.case === "roundCompleted") {
      const { number, decisionToken, numLive } = event.value.round!;
      console.log(`round ${number}: ${numLive} candidates live at token ${decisionToken}`);
    } else if (event.case === "textDelta") {
      process.stdout.write(event.value.text);
    } else if (event.case === "finished") {
      console.log(`\nscore ${event.value.score}`);
    }
  }
} catch (error) {
  for (const { field, description } of violations(error)) console.error(`${field}: ${description}`);
  console.error(ConnectError.from(error).message, retryAfterMs(error) ?? "not to be repeated");
  process.exitCode = 1;
} finally {
  client.close();
}
