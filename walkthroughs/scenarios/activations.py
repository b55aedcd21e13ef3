"""Activation functions: by hand, by their slopes, and in the embedded model's MLPs."""

from __future__ import annotations

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.inputs import TokensPrompt
from nanovllm.lab import activations as lab
from nanovllm.model_executor.layers.activation import get_act_fn

NUM_TOKENS = 512
EITHER = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])  # the inputs of xor
XOR = torch.tensor([0.0, 1.0, 1.0, 0.0])

llm = LLM(
    device="cpu",
    dtype="float32",
    max_model_len=1024,
    enforce_eager=True,
    enable_prefix_caching=False,
    num_gpu_blocks_override=80,
)


def two_layers() -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices in a row, and their product."""
    generator = torch.Generator().manual_seed(0)
    x, w1, w2 = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((5, 8), (8, 32), (32, 3))
    )
    return x @ w1 @ w2, x @ (w1 @ w2)


def xor() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs a and b: the best that a linear map (with a bias) does, and two hidden relu units."""
    with_bias = torch.cat((EITHER, torch.ones(4, 1)), dim=1)
    best_linear = with_bias @ torch.linalg.lstsq(with_bias, XOR[:, None]).solution[:, 0]
    total = EITHER.sum(dim=1)  # a + b
    hidden = lab.relu(torch.stack((total, total - 1), dim=1))
    return best_linear, hidden @ torch.tensor([1.0, -2.0])


def slopes(name: str) -> tuple[float, float, float]:
    """The derivative at -3 and at 3, and what is left of a gradient after ten layers at 3."""
    low, high = lab.ACTIVATIONS[name].derivative(torch.tensor([-3.0, 3.0])).tolist()
    return low, high, high**10


def main() -> None:
    deep, shallow = two_layers()
    print("two linear layers differ from one by", (deep - shallow).abs().max().item())
    linear, with_relu = xor()
    print(f"xor: linear {linear.tolist()}, with relu {with_relu.tolist()}")
    for activation in lab.ACTIVATIONS.values():
        print(activation.function.__name__, lab.shape(activation))
    for name in lab.ACTIVATIONS:
        print(name, slopes(name))
    gelu_of_gpt2 = get_act_fn("gelu_new")
    x = torch.linspace(-6, 6, 1201, dtype=torch.float64)
    print("gelu and its tanh differ by", (gelu_of_gpt2(x) - lab.gelu(x)).abs().max().item())
    lab.silu_and_mul_derivatives(torch.tensor([-8.0, -1.0, 0.0, 4.0]), torch.full((4,), 2.0))
    prompts = lab.read_prompts(llm, lab.HELD_OUT, NUM_TOKENS)
    one = TokensPrompt(prompt_token_ids=prompts[0][:4])
    llm.generate(one, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    measurements = [lab.measure(llm, prompts, name) for name in lab.COMPARED]
    lab.print_measurements(measurements, f"{NUM_TOKENS} tokens")


if __name__ == "__main__":
    main()
