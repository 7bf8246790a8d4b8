"""The official OpenAI client against a server on this machine.

deepinfer serve                       # in another terminal
pip install openai
python examples/openai_client.py [http://127.0.0.1:8000/v1]
"""

import sys

from openai import BadRequestError, OpenAI

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1",
    api_key="unused",  # unless the server was started with --tenants
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the capital of France?"}]

stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=64, temperature=0, stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# Several prompts at once, two choices each, with log probabilities.
done = client.completions.create(
    model=model, prompt=["The sea is", "Once upon a time"], n=2, max_tokens=8, logprobs=1, seed=1
)
for choice in done.choices:
    nats = sum(choice.logprobs.token_logprobs)
    print(f"{choice.index}: {choice.text!r} {choice.finish_reason} {nats:.1f} nats")
print(done.usage.total_tokens, "tokens")

try:
    client.completions.create(model=model, prompt="x", temperature=-1)
except BadRequestError as error:
    print(f"refused: {error.param}: {error.body['message']}")
