"""On real weights the model says what transformers says, in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.llama import Model
from support.checkpoints import one_torch_thread, reference_model
from support.ragged_rows import RaggedRows

# About a minute and a half on two idle cores; the limit is for busy ones.
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

NEW_TOKENS = 64
BLOCK_SIZE = 16
README = Path(__file__).parents[1] / "README.md"
QUESTIONS = (
    "What is the capital of France?",
    "Name the planets of the solar system in order.",
    "Write a haiku about rain on a tin roof.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of copper.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "Tell me a short story about a lost umbrella.",
    "How do I boil an egg?",
    "Give me a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "What is photosynthesis?",
    "Suggest a name for a small bakery and say why.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite email asking for a day off.",
    "Why do leaves change colour in autumn?",
    "Describe the taste of a lemon to someone who has never had one.",
    "What is the largest ocean?",
    "Give three tips for sleeping better.",
    "Write the opening line of a detective novel.",
)


@pytest.fixture(autouse=True, scope="module")
def calm_torch():
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def prompts(smollm2_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def load(folder, dtype, **options):
    model = Model.load(folder, CpuBackend(num_threads=2), dtype, max_model_len=1024, **options)
    model.attach_cache(num_blocks=512, block_size=BLOCK_SIZE)
    return model


@pytest.fixture(scope="module")
def generated(smollm2_folder, prompts):
    """The prompts continued greedily, all in one batch: [(token ids, logits [64, V])]."""
    model = load(smollm2_folder, "float32")
    rows = RaggedRows(model, len(prompts))
    tokens = [list(prompt) for prompt in prompts]
    logits = [[] for _ in prompts]
    step = dict(enumerate(prompts))
    for _ in range(NEW_TOKENS):
        for row, out in rows.step(step).items():
            logits[row].append(out[-1])
            tokens[row].append(int(out[-1].argmax()))
        step = {row: ids[-1:] for row, ids in enumerate(tokens)}
    return [(ids, np.stack(out)) for ids, out in zip(tokens, logits, strict=True)]


@pytest.fixture(scope="module")
def reference_logits(smollm2_folder, generated):
    """transformers' float32 logits for the 64 generated tokens of each row, [64, V].

    One forward over prompt and output stands for 64 steps of generation: at every position it
    tells which token transformers would have chosen after the same beginning.
    """
    return teacher_forced(reference_model(smollm2_folder), generated)


def teacher_forced(reference, generated):
    with torch.inference_mode():
        return [
            reference(torch.tensor([ids[:-1]]), logits_to_keep=NEW_TOKENS).logits[0].float().numpy()
            for ids, _ in generated
        ]


def test_greedy_float32_text_is_that_of_transformers(generated, reference_logits):
    for (ids, _), want in zip(generated, reference_logits, strict=True):
        chosen = np.array(ids[-NEW_TOKENS:])
        best = want.max(axis=-1)
        # Where the two best are closer than rounding, either of them is right.
        assert (best - want[np.arange(NEW_TOKENS), chosen] <= 1e-3).all()


def test_float32_logits_are_those_of_transformers(generated, reference_logits):
    for (_, got), want in zip(generated, reference_logits, strict=True):
        assert np.abs(got - want).max() < 1e-3


def test_bfloat16_strays_no_further_than_transformers_own(
    smollm2_folder, generated, reference_logits
):
    # Every fifth row: without bfloat16 instructions torch needs some seconds for each.
    some, want = generated[::5], reference_logits[::5]
    model = load(smollm2_folder, "bfloat16")
    rows = RaggedRows(model, len(some))
    ours = [rows.step({row: ids[:-1]})[row][-NEW_TOKENS:] for row, (ids, _) in enumerate(some)]
    theirs = teacher_forced(reference_model(smollm2_folder, torch.bfloat16), some)
    mine, others = mean_kl(want, ours), mean_kl(want, theirs)
    print(f"bfloat16: mean KL {mine:.2e} nats, transformers' {others:.2e}")
    assert mine <= 1.2 * others


def test_an_int8_cache_moves_the_logits_little(smollm2_folder, generated):
    model = load(smollm2_folder, "float32", kv_cache_dtype="int8")
    rows = RaggedRows(model, len(generated))
    ours = [rows.step({row: ids[:-1]})[row][-NEW_TOKENS:] for row, (ids, _) in enumerate(generated)]
    kl = mean_kl([logits for _, logits in generated], ours)
    print(f"int8 KV cache: mean KL {kl:.2e} nats")
    assert 1e-6 < kl < 5e-3


def test_int4_strays_little_where_the_weights_were_of_four_bits(
    smollm2_folder, generated, reference_logits
):
    # These weights come from a Q4_1 file: theirs is the form that is found again, and what is left
    # is the rounding of activations. Scales of whole tokens instead of 32 values: 0.03 nats.
    some, want = generated[::5], reference_logits[::5]
    rows = RaggedRows(load(smollm2_folder, "float32", quantization="int4"), len(some))
    ours = [rows.step({row: ids[:-1]})[row][-NEW_TOKENS:] for row, (ids, _) in enumerate(some)]
    kl = mean_kl(want, ours)
    print(f"int4: mean KL {kl:.2e} nats")
    assert kl <= 0.004


def test_int8_stays_near_float32(smollm2_folder, generated):
    # 0.003 nats are the weights' rounding; without the rotation the whole would be 0.09.
    model = load(smollm2_folder, "float32", quantization="int8")
    rows = RaggedRows(model, len(generated))
    got = [rows.step({row: ids[:-1]})[row][-NEW_TOKENS:] for row, (ids, _) in enumerate(generated)]
    kl = mean_kl([want for _, want in generated], got)
    print(f"int8: mean KL {kl:.2e} nats")
    assert 0 < kl < 0.008


@pytest.fixture(scope="module")
def readme(smollm2_folder):
    """Token ids of the beginning of README.md, a text that no model wrote."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    return tokenizer(README.read_text())["input_ids"][:1024]


@pytest.fixture(scope="module")
def float32_perplexity(smollm2_folder, readme):
    return perplexity(load(smollm2_folder, "float32"), readme)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_change_perplexity_little(
    smollm2_folder, readme, float32_perplexity, quantization
):
    model = load(smollm2_folder, "float32", quantization=quantization)
    ratio = perplexity(model, readme) / float32_perplexity
    print(f"{quantization}: perplexity {float32_perplexity:.3f}, times {ratio:.4f}")
    assert abs(ratio - 1) < 0.015


def perplexity(model, ids):
    """The exponential of the mean negative log-likelihood of each token after the first."""
    logits = torch.from_numpy(np.asarray(RaggedRows(model, 1).step({0: ids[:-1]})[0])).double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).exp().item()


def mean_kl(reference, other):
    """Mean over all tokens of KL(reference || other), in nats."""
    per_row = []
    for p, q in zip(reference, other, strict=True):
        p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (p, q))
        per_row.append((p.exp() * (p - q)).sum(-1).mean().item())
    return float(np.mean(per_row))
