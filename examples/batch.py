"""A batch in a script, with log probabilities.

python examples/batch.py
"""

from deepinfer import LLM, SamplingParams


def main() -> None:
    with LLM("smollm2-135m") as llm:
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=1)
        for completion in llm.generate(["The sea is", "Once upon a time"], params):
            assert completion.logprobs is not None
            sure = sum(
                entry[token]
                for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
            )
            print(f"{completion.prompt}{completion.text!r} ({sure:.1f} nats)")


if __name__ == "__main__":
    main()
