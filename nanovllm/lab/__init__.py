"""The lab: what the engine does not need but its readers do.

The kernels, one step at a time. Each file adds one idea to the file before it, and is a Triton
kernel, a plain PyTorch reference and a function to call:

    softmax.py          a row stays on the chip between its one read and its one write
    online_softmax.py   a row longer than the chip; maximum and sum run along with the tiles
    flash_attention.py  the same running state, carrying a weighted sum of values
    paged_decode.py     keys and values in pages, one query a sequence, keys split up

memory_traffic.py counts the bytes each of them moves; `python -m nanovllm.lab` prints the count.

Two files measure what the engine computes with. `python -m nanovllm.lab.activations` and
`python -m nanovllm.lab.positions` print tables, and plot with --png FILE:

    activations.py      the functions inside MLPs, by themselves and in a trained model
    positions.py        how scores fall with the distance, from sinusoidal to YaRN

Upstream: none; the engine's kernels live in nanovllm/v1/attention/ops.
"""
