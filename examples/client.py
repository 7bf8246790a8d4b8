"""A client of an engine that runs elsewhere: stream a completion, look at its story.

deepinfer engine --endpoint tcp://127.0.0.1:5757     (in another terminal)
python examples/client.py
"""

import asyncio
import sys

from deepinfer import Client, SamplingParams


async def main(endpoint: str) -> None:
    async with Client(endpoint) as client:
        params = SamplingParams(max_tokens=24, seed=7)
        async for out in client.generate("The sea is", params, request_id="sea"):
            print(out.text, end="", flush=True)
        print(f"\n[{out.finish_reason}: {out.finish_detail}]")
        for event in await client.trace("sea"):
            print(f"{event.at_ms:9.1f} ms  {event.event}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5757"))
