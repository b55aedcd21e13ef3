"""The server that speaks OpenAI's protocol (`nanovllm serve`)."""
