"""Two prompts, two endings: one request meets its stop string, the other runs out of tokens."""

from nanovllm import LLM, SamplingParams

llm = LLM(
    device="cpu",
    dtype="float32",
    enforce_eager=True,
    block_size=4,
    num_gpu_blocks_override=12,
    max_model_len=32,
)
# The hero stops at a text that no single token holds; the companion takes the tokens it was given.
HERO = SamplingParams(temperature=0, max_tokens=16, stop="little girl")
COMPANION = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def main() -> None:
    prompts = ["Once upon a time", "The little dog"]
    outputs = llm.generate(prompts, [HERO, COMPANION], use_tqdm=False)
    for output in outputs:
        completion = output.outputs[0]
        print(repr(output.prompt), "->", repr(completion.text))
        print(f"    {len(completion.token_ids)} tokens", completion.token_ids, end=" ")
        print(f"finish_reason={completion.finish_reason!r} stop_reason={completion.stop_reason!r}")


if __name__ == "__main__":
    main()
