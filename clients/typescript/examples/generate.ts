// One answer with its score, and what it cost. npm run build && node dist/examples/generate.js
import { Client } from "specrej";

const client = new Client({ address: process.env.SPECREJ_ADDRESS });
try {
  const answer = await client.generate({
    prompt: { messages: [{ role: "user", content: "Name three uses of a brick." }] },
    sampling: { maxTokens: 64, seed: 7n },
    selection: { n: 16, alpha: 0.5 },
  });
  console.log(answer.text);
  const { generatedTokens, bestOfNTokensEstimate } = answer.usage!;
  console.log(`score ${answer.score}`);
  console.log(`${generatedTokens} tokens; Best-of-N: about ${bestOfNTokensEstimate}`);
} finally {
  client.close();
}
