"""Answer a question with CARD and compare with plain decoding: the same text, token for token."""

from card import LLM, SamplingParams

problem = "Anna has 25 apples. She eats 3 apples and gives 6 apples to a friend. How many apples does she have left?"
question = [{"role": "user", "content": problem}]
params = SamplingParams(max_tokens=100)
with LLM("demo-target", "demo-draft", dtype="float32") as card, LLM(method="vanilla", dtype="float32") as plain:
    for chunk in card.stream(question, params):
        print(chunk.text, end="", flush=True)
    print(f"\n{chunk.stats.mean_acceptance_length:.1f} tokens per target pass")
    fast, slow = card.chat(question, params)[0], plain.chat(question, params)[0]
assert fast.outputs[0].token_ids == slow.outputs[0].token_ids
