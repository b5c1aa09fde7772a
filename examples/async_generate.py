"""Ask several questions at once: they share the target's passes, and each answer streams as it comes."""

import asyncio

from card import AsyncLLM, SamplingParams

QUESTIONS = (
    "Anna has 25 apples. She eats 3 apples and gives 6 apples to a friend. How many apples does she have left?",
    "Paul works 4 hours a day and earns $12 per hour. How much does he earn in 3 days?",
    "Lucy has $50. She buys a bag for $18 and a book for $12. How much money does she have left?",
)


async def ask(llm: AsyncLLM, question: str) -> None:
    text = ""
    async for chunk in llm.generate([{"role": "user", "content": question}], SamplingParams(max_tokens=100)):
        text += chunk.text
    print(f"{question}\n{text}\n({chunk.stats.mean_acceptance_length:.1f} tokens per target pass)\n")


async def main() -> None:
    async with AsyncLLM("demo-target", "demo-draft") as llm:
        await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))


asyncio.run(main())
