"""Ask a vision-language model about pictures, all at once, each answer as it comes.

python examples/pictures.py MODEL FILE_OR_URL …

MODEL is a Hugging Face folder of a SmolVLM, Idefics3 or Qwen2.5-VL model. URLs are fetched by the
image worker, from the open internet alone.
"""

import asyncio
import sys
from pathlib import Path

from deepinfer import AsyncEngine, EngineArgs, SamplingParams


async def describe(engine: AsyncEngine, source: str) -> None:
    image = source if source.startswith(("http:", "https:")) else Path(source).read_bytes()
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
    params = SamplingParams(max_tokens=64, temperature=0)
    text = ""
    async for output in engine.generate([{"role": "user", "content": content}], params):
        text += output.text
    # A picture that cannot be read ends its own request, and says why.
    end = output.finish_detail if output.finish_reason == "image_failed" else f"{text!r}"
    print(f"{source} ({output.prompt_len} tokens): {end}")


async def main() -> None:
    model, *sources = sys.argv[1:]
    async with AsyncEngine(EngineArgs(model=model, image_urls=True)) as engine:
        await asyncio.gather(*(describe(engine, source) for source in sources))


if __name__ == "__main__":
    asyncio.run(main())
