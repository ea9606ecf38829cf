// A conversation that changes its model, with the official client for Node.
//
//     npm install openai
//     OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none node examples/node_chat.mjs small big

import { createRequire } from "node:module";

// Through `require`, which also looks where NODE_PATH says.
const OpenAI = createRequire(import.meta.url)("openai");

const [first, second] = process.argv.slice(2);
const client = new OpenAI({ maxRetries: 0 });

const messages = [{ role: "user", content: "What is a key-value cache?" }];
const answer = await client.chat.completions.create({ model: first, messages, max_tokens: 40, temperature: 0 });
const said = answer.choices[0].message.content;
console.log(`${answer.model}: ${said}`);

messages.push({ role: "assistant", content: said }, { role: "user", content: "And how large does it get?" });
process.stdout.write(`${second}: `);
let told;
const stream = await client.chat.completions.create({
  model: second, messages, max_tokens: 40, temperature: 0, stream: true, kvlingo: { tail: 4 },
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0].delta.content ?? "");
  told = chunk.kvlingo ?? told;
}
console.log(`\nkvlingo: ${JSON.stringify(told)}`);

try {
  await client.chat.completions.create({ model: "nobody", messages });
} catch (error) {
  if (!(error instanceof OpenAI.NotFoundError)) throw error;
  console.log(`error: ${error.constructor.name} ${error.status} ${error.code}`);
}
