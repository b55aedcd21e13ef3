"""One short request, end to end."""

from nanovllm import LLM, SamplingParams

llm = LLM(
    device="cpu",
    dtype="float32",
    enforce_eager=True,
    block_size=4,
    num_gpu_blocks_override=9,
    max_model_len=32,
)


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    print(output.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
