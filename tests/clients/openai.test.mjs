// What the npm package `openai` asks for, it gets. The server's address and key come from test_openai_npm.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import OpenAI from "openai";

const SERVER = process.env.CLIENT_SERVER_URL;
const KEY = process.env.CLIENT_API_KEY;
assert.ok(SERVER && KEY, "CLIENT_SERVER_URL and CLIENT_API_KEY must be set; run make test-clients");

const client = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const PROMPT = "A farmer has 12 cows and 30 sheep. He sells";
const messages = [{ role: "user", content: PROMPT }];
const greedy = { model: "demo-target", temperature: 0 };

async function collected(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
}

async function refusal(promise) {
  return promise.then(
    () => assert.fail("the request was not refused"),
    (error) => error,
  );
}

async function metric(name, label = "") {
  const text = await (await fetch(`${SERVER}/metrics`)).text();
  const line = text.split("\n").find((one) => one.startsWith(`${name}{`) && one.includes(label));
  assert.ok(line, `no ${name} with ${label}`);
  return Number(line.split(" ").at(-1));
}

test("models are listed under their served names", async () => {
  const models = await collected(await client.models.list());
  assert.deepEqual(
    models.map((model) => model.id),
    ["demo-target"],
  );
  assert.equal((await client.models.retrieve("demo-target")).object, "model");
});

test("a conversation is answered with text, reason and usage", async () => {
  const answer = await client.chat.completions.create({ messages, max_completion_tokens: 16, ...greedy });
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.choices[0].message.role, "assistant");
  assert.ok(answer.choices[0].message.content.length > 0);
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, 16);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 16);
  assert.ok(answer._request_id);
});

test("a streamed conversation is the same text in pieces, with the usage last", async () => {
  const asked = { messages, max_tokens: 24, ...greedy };
  const whole = await client.chat.completions.create(asked);
  const options = { stream: true, stream_options: { include_usage: true } };
  const pieces = await collected(await client.chat.completions.create({ ...asked, ...options }));
  const text = pieces.map((piece) => piece.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, whole.choices[0].message.content);
  assert.ok(pieces.length > 3);
  assert.equal(new Set(pieces.map((piece) => piece.id)).size, 1);
  assert.deepEqual(pieces.at(-1).choices, []);
  assert.equal(pieces.at(-1).usage.completion_tokens, 24);
  assert.equal(pieces.at(-2).choices[0].finish_reason, "length");
});

test("the client's own helper puts a stream together again", async () => {
  const asked = { messages, max_tokens: 24, ...greedy };
  const whole = await client.chat.completions.create(asked);
  const put = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.equal(put.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(put.choices[0].finish_reason, "length");
});

test("a prompt is continued, streamed or not, with the usage last", async () => {
  const asked = { prompt: PROMPT, max_tokens: 16, ...greedy };
  const whole = await client.completions.create(asked);
  assert.equal(whole.object, "text_completion");
  assert.equal(whole.usage.completion_tokens, 16);
  const options = { stream: true, stream_options: { include_usage: true } };
  const pieces = await collected(await client.completions.create({ ...asked, ...options }));
  assert.equal(pieces.map((piece) => piece.choices[0]?.text ?? "").join(""), whole.choices[0].text);
  assert.equal(pieces.at(-1).usage.completion_tokens, 16);
});

test("speculation changes no word, and may be left out for a request", async () => {
  const asked = { prompt: PROMPT, max_tokens: 40, include_metrics: true, ...greedy };
  const [fast, plain] = await Promise.all([
    client.completions.create(asked),
    client.completions.create({ ...asked, speculation: "off" }),
  ]);
  assert.equal(fast.choices[0].text, plain.choices[0].text);
  assert.ok(fast.metrics.speculative_decoding.num_accepted_draft_tokens > 0);
  assert.equal(plain.metrics.speculative_decoding.num_draft_tokens, 0);
});

test("an answer fits the schema that was asked for", async () => {
  const schema = {
    type: "object",
    properties: { animal: { enum: ["cow", "sheep"] }, sold: { type: "boolean" } },
    required: ["animal", "sold"],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.create({
    messages,
    max_tokens: 200, // the grammar allows blanks, and a small model writes many
    response_format: { type: "json_schema", json_schema: { name: "sale", schema, strict: true } },
    ...greedy,
  });
  const sale = JSON.parse(answer.choices[0].message.content);
  assert.deepEqual(Object.keys(sale).sort(), ["animal", "sold"]);
  assert.ok(["cow", "sheep"].includes(sale.animal));
  assert.equal(typeof sale.sold, "boolean");
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("several choices differ and come again with the same seed", async () => {
  const asked = { messages, model: "demo-target", max_tokens: 16, n: 2, temperature: 1, seed: 11 };
  const first = await client.chat.completions.create(asked);
  const again = await client.chat.completions.create(asked);
  const texts = first.choices.map((choice) => choice.message.content);
  assert.deepEqual(
    first.choices.map((choice) => choice.index),
    [0, 1],
  );
  assert.notEqual(texts[0], texts[1]);
  assert.deepEqual(
    again.choices.map((choice) => choice.message.content),
    texts,
  );
});

test("log-probabilities come with their alternatives and spell the answer", async () => {
  const asked = { messages, max_tokens: 8, logprobs: true, top_logprobs: 3, ...greedy };
  const answer = await client.chat.completions.create(asked);
  const told = answer.choices[0].logprobs.content;
  assert.equal(told.length, 8);
  assert.equal(told.map((token) => token.token).join(""), answer.choices[0].message.content);
  for (const token of told) {
    assert.equal(token.top_logprobs.length, 3);
    assert.equal(token.logprob, Math.max(...token.top_logprobs.map((top) => top.logprob)));
    assert.ok(token.logprob <= 0);
  }
});

test("a stream that is given up frees its place before the text is written", async () => {
  const aborted = await metric("card_requests_finished_total", 'finished_reason="abort"');
  const asked = { prompt: PROMPT, max_tokens: 900, ignore_eos: true, stream: true, ...greedy };
  const stream = await client.completions.create(asked);
  for await (const piece of stream) {
    assert.ok(piece.choices[0].text.length >= 0);
    stream.controller.abort();
    break;
  }
  while ((await metric("card_requests_inside")) > 0) await sleep(20);
  assert.equal(await metric("card_requests_finished_total", 'finished_reason="abort"'), aborted + 1);
});

test("a forced call of a function is put together by the client's helpers, in chat and as a response", async () => {
  const parameters = { type: "object", properties: { a: { enum: [1, 2] } }, required: ["a"] };
  const tools = [{ type: "function", function: { name: "f", parameters } }];
  const forced = { tool_choice: "required", parallel_tool_calls: false };
  const stream = client.chat.completions.stream({ messages, tools, ...forced, ...greedy });
  const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
  assert.equal(call.function.name, "f");
  assert.ok([1, 2].includes(JSON.parse(call.function.arguments).a));
  const own = [{ type: "function", name: "f", parameters, strict: true }];
  const response = client.responses.stream({ input: PROMPT, tools: own, ...forced, ...greedy });
  const [item] = (await response.finalResponse()).output;
  assert.equal(item.type, "function_call");
  assert.equal(item.arguments, call.function.arguments);
});

test("a wrong key is an AuthenticationError", async () => {
  const stranger = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: "not-the-key", maxRetries: 0 });
  const error = await refusal(stranger.models.list());
  assert.ok(error instanceof OpenAI.AuthenticationError, String(error));
  assert.equal(error.status, 401);
  assert.equal(error.code, "invalid_api_key");
});

test("a model that is not served is a NotFoundError with its code", async () => {
  const error = await refusal(client.models.retrieve("nobody"));
  assert.ok(error instanceof OpenAI.NotFoundError, String(error));
  assert.equal(error.code, "model_not_found");
  assert.equal(error.param, "model");
});

test("a field that is not done is a BadRequestError with its name", async () => {
  const asked = { messages, functions: [{ name: "f" }], ...greedy };
  const error = await refusal(client.chat.completions.create(asked));
  assert.ok(error instanceof OpenAI.BadRequestError, String(error));
  assert.equal(error.code, "unsupported_parameter");
  assert.equal(error.param, "functions");
  assert.match(error.message, /functions is not supported/);
  assert.ok(error.requestID);
});

test("a prompt that is too long is a BadRequestError, streamed or not, and the next request works", async () => {
  for (const stream of [false, true]) {
    const error = await refusal(client.completions.create({ prompt: PROMPT.repeat(1000), stream, ...greedy }));
    assert.ok(error instanceof OpenAI.BadRequestError, String(error));
    assert.equal(error.code, "context_length_exceeded");
  }
  assert.ok(await client.completions.create({ prompt: PROMPT, max_tokens: 1, ...greedy }));
});
