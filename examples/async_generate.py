"""Ask several questions at once: they share the target's passes, and each answer streams as it comes."""

import asyncio

from card import AsyncLLM, SamplingParams

QUESTIONS = (
    "Tom has 3 boxes with 8 pencils each. He gives away 5. How many has he left?",
    "A ticket costs $6 for a student and $10 for an adult. How much do 4 students and 2 adults pay?",
    "Nina runs 4 miles on Monday and twice as far on Wednesday. How many miles does she run in total?",
)


async def ask(llm: AsyncLLM, question: str) -> None:
    text = ""
    async for chunk in llm.generate([{"role": "user", "content": question}], SamplingParams(temperature=0.0)):
        text += chunk.text
    print(f"{question}\n{text}\n({chunk.stats.mean_acceptance_length:.1f} tokens per target pass)\n")


async def main() -> None:
    async with AsyncLLM("demo-target", "demo-draft") as llm:
        await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))


asyncio.run(main())
