// The npm `openai` client against a server: node openai_node.cjs URL. Exits with 1 where it fails.
const assert = require("node:assert");
const { default: OpenAI } = require("openai");

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "unused", maxRetries: 0 });
  const model = (await client.models.list()).data[0].id;
  const ask = {
    model,
    messages: [{ role: "user", content: "What is the capital of France?" }],
    max_tokens: 20,
    temperature: 0,
  };

  const whole = await client.chat.completions.create({ ...ask, n: 2, logprobs: true, top_logprobs: 2 });
  const [first, second] = whole.choices;
  assert.match(first.message.content, /Paris/);
  assert.strictEqual(second.message.content, first.message.content);
  assert.ok(first.logprobs.content.every((entry) => entry.top_logprobs.length === 2));

  const stream = await client.chat.completions.create({
    ...ask,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.strictEqual(text, first.message.content);
  assert.strictEqual(usage.completion_tokens * 2, whole.usage.completion_tokens);

  const refusals = [
    [OpenAI.BadRequestError, { temperature: -1 }],
    [OpenAI.NotFoundError, { model: "other" }],
  ];
  for (const [kind, fields] of refusals) {
    await assert.rejects(client.chat.completions.create({ ...ask, ...fields }), kind);
  }

  const left = await client.chat.completions.create({ ...ask, max_tokens: 4000, stream: true });
  for await (const chunk of left) {
    assert.ok(chunk.id);
    break; // leaves the loop, which aborts the request
  }
  console.log("the npm client is content");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
