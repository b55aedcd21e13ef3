"""Measuring a server from outside, as vLLM's `bench` does.

Upstream: vllm/benchmarks/ (0.23.0)
Left out: latency, throughput, startup and multimodal benchmarks, parameter sweeps, plots.
"""
