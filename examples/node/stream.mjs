// Streams one completion to its end, and aborts another after five tokens.
//
//   deepinfer engine --endpoint tcp://127.0.0.1:5757        (in another terminal)
//   npm ci && node stream.mjs tcp://127.0.0.1:5757
//
// An engine with keys wants three files of `deepinfer keys` more, whose places are given in this
// order: server.pub, NAME.pub, NAME.key.

import { readFileSync } from "node:fs";
import { Engine } from "./deepinfer.mjs";

const [endpoint = "tcp://127.0.0.1:5757", ...files] = process.argv.slice(2);
const [serverKey, publicKey, secretKey] = files.map((file) => readFileSync(file, "utf8").trim());

const engine = await Engine.connect(endpoint, serverKey && { serverKey, publicKey, secretKey });
console.log(`model: ${engine.info.model}, vocabulary of ${engine.info.vocabSize}`);

// Token ids, not text: a tokenizer is the client's own business.
async function stream(requestId, prompt, params, abortAfter = Infinity) {
  const tokens = [];
  let end;
  for await (const token of engine.generate(requestId, prompt, params, (e) => (end = e))) {
    tokens.push(token);
    if (tokens.length === abortAfter) engine.abort(requestId);
  }
  console.log(`${requestId}: ${tokens.join(" ")}`);
  console.log(`${requestId}: ${end.reason} (${end.detail}) after ${end.numOutputTokens} tokens`);
}

const greedy = { temperature: 0, ignore_eos: true };
await Promise.all([
  stream("whole", [3, 4, 5], { ...greedy, max_tokens: 24 }),
  stream("aborted", [6, 7, 8], { ...greedy, max_tokens: 900 }, 5),
]);
await engine.close();
