"""An engine inside an asyncio app: several chats at once, streamed side by side.

python examples/embed.py
"""

import asyncio

from deepinfer import AsyncEngine, EngineArgs, SamplingParams

QUESTIONS = ["What is the capital of France?", "Name three primary colours."]


async def answer(engine: AsyncEngine, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    params = SamplingParams(max_tokens=48, temperature=0)
    return "".join([out.text async for out in engine.generate(messages, params)])


async def main() -> None:
    async with AsyncEngine(EngineArgs(model="smollm2-135m")) as engine:
        answers = await asyncio.gather(*(answer(engine, question) for question in QUESTIONS))
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n  {text}")


if __name__ == "__main__":
    asyncio.run(main())
