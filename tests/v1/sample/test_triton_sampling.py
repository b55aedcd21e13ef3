"""The Triton kernels sample the tokens that the torch code samples.

On the CPU they are interpreted, with small tiles and lists so that small vocabularies have many.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.sampling_params import SamplingParams
from nanovllm.triton_utils import tl, triton
from nanovllm.v1.sample import sampler as sampler_module
from nanovllm.v1.sample.metadata import UNSEEDED
from nanovllm.v1.sample.ops import gumbel, seeded_noise, topk_topp_triton
from nanovllm.v1.sample.ops.penalties import make_output_matrix
from nanovllm.v1.sample.ops.seeded_noise import gumbel_noise, row_keys, step_keys
from nanovllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from nanovllm.v1.sample.sampler import Sampler
from tests.v1.sample import sampling_oracle as oracle
from tests.v1.sample.sampling_oracle import Row, make_metadata
from tests.v1.sample.test_sampler import CHI2_999, FIVE, VARIANTS, VOCAB, chi_square, random_batch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [
    pytest.param("cpu", torch.float32, id="cpu"),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu, id="cuda-float32"),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu, id="cuda-bfloat16"),
]
SMALL_TILE, SMALL_LIST = 256, 512


@pytest.fixture
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gumbel, topk_topp_triton):
        monkeypatch.setattr(module, "TILE", SMALL_TILE)
    monkeypatch.setattr(topk_topp_triton, "LIST_CAPACITY", SMALL_LIST)
    monkeypatch.setattr(topk_topp_triton, "LIST_BLOCK", 256)


small_tiles = pytest.mark.usefixtures("_tiles")


@dataclasses.dataclass
class Case:
    """A batch for the kernels. Any of k, p, log_min_p may be None."""

    logits: torch.Tensor
    keys: torch.Tensor
    temperature: torch.Tensor
    k: torch.Tensor | None
    p: torch.Tensor | None
    log_min_p: torch.Tensor | None

    def triton(self) -> torch.Tensor:
        before = self.logits.clone()
        sampled = TopKTopPSampler().forward_cuda(
            self.logits, self.keys, self.k, self.p, self.temperature, self.log_min_p
        )
        assert torch.equal(self.logits.nan_to_num(), before.nan_to_num())
        return sampled

    def scores(self, factor: float = 1.0) -> torch.Tensor:
        """What the argmax is taken of in the torch code, in float32; p is multiplied by factor."""
        greedy = self.temperature < 1e-5
        logits = self.logits.float()
        filtered = logits / torch.where(greedy, 1.0, self.temperature).unsqueeze(1)
        if self.log_min_p is not None:
            floor = filtered.amax(dim=-1, keepdim=True) + self.log_min_p.unsqueeze(1)
            filtered.masked_fill_(filtered < floor, -float("inf"))
        p = self.p if self.p is None else torch.where(self.p < 1, self.p * factor, self.p)
        filtered = apply_top_k_top_p(filtered, self.k, p)
        token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        noise = gumbel_noise(self.keys, token_ids.expand(len(logits), -1))
        return torch.where(greedy.unsqueeze(1), logits, filtered + noise)

    def check(self, share_of_ties: float = 0.02) -> None:
        """Same tokens; a few may differ if their scores are equal to rounding, or if they come or
        go with the hundred-thousandth part of p."""
        sampled = self.triton()
        assert sampled.dtype == torch.int64
        scores = self.scores()
        expected = scores.argmax(dim=-1)
        wrong = (sampled != expected).nonzero().flatten().tolist()
        assert len(wrong) <= share_of_ties * sampled.numel()
        near = [scores, self.scores(1 - 1e-5), self.scores(1 + 1e-5)] if wrong else []
        for row in wrong:
            gaps = [float(s[row].max() - s[row, sampled[row]]) for s in near]
            assert min(gaps) < 1e-4, (row, gaps)


def make_case(
    seed: int,
    num_rows: int,
    vocab_size: int,
    scale: float,
    filters: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    max_k: int | None = None,
) -> Case:
    """Every third row neutral in each filter, every fifth greedy; k small, middling or large."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, device=device, generator=generator) * scale
    if tied:
        logits = (logits * 4).round() / 4
    rows = np.arange(num_rows)
    k = np.exp(rng.uniform(0, np.log(max_k or vocab_size), num_rows)).astype(np.int32)
    k = np.where(rows % 3 == 1, vocab_size, k.clip(1))
    p = np.where(rows % 3 == 2, 1.0, rng.choice([1e-4, 0.1, 0.5, 0.9, 0.95, 0.999], num_rows))
    min_p = np.where(rows % 3 == 0, 0.0, rng.uniform(0, 0.3, num_rows))
    temperature = np.where(rows % 5 == 4, 0.0, rng.choice([0.5, 1.0, 1.7], num_rows))
    with np.errstate(divide="ignore"):
        columns = [np.log(min_p), p, temperature]
    log_min_p, p, temperature = (torch.from_numpy(c).float().to(device) for c in columns)
    return Case(
        logits.to(device, dtype),
        row_keys(torch.from_numpy(rows) * 7919 + seed, torch.full((num_rows,), seed)).to(device),
        temperature,
        torch.from_numpy(k.astype(np.int32)).to(device) if "k" in filters else None,
        p if "p" in filters else None,
        log_min_p if "m" in filters else None,
    )


# ---- noise ----


@triton.jit
def _noise_kernel(keys_ptr, out_ptr, APPROX_LOG: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0)
    token_ids = tl.arange(0, N)
    low, high = tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1)
    noise = seeded_noise.gumbel_noise_kernel(low, high, token_ids, APPROX_LOG)
    tl.store(out_ptr + row * N + token_ids, noise)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_equal_those_of_torch(device: str) -> None:
    """For any 64-bit seed and position; rows without a seed take the fresh one at position 0."""
    big = torch.iinfo(torch.int64)
    seeds = torch.tensor([0, 1, -2, 12345, big.min, big.max, UNSEEDED, UNSEEDED] * 20).to(device)
    positions = torch.tensor([0, 1, 131071, 7, 2**40, 3, 0, 5] * 20).to(device)
    fresh = torch.arange(160, device=device) * 999_999_999_999 - 7
    expected = row_keys(
        torch.where(seeds == UNSEEDED, fresh, seeds),
        torch.where(seeds == UNSEEDED, 0, positions),
    )
    assert torch.equal(step_keys(fresh, seeds, positions), expected)
    assert torch.equal(step_keys(fresh, None, None), row_keys(fresh, torch.zeros_like(fresh)))


@pytest.mark.parametrize("device", DEVICES)
def test_noise_equals_that_of_torch(device: str) -> None:
    """The hash bit for bit (a flipped bit would move the noise by far more than the logarithms'
    rounding), also where uniform numbers are tiny."""
    keys = row_keys(torch.arange(40) - 20, torch.arange(40)).to(device)
    out = torch.full((40, 4096), torch.nan, device=device)
    _noise_kernel[(40,)](keys, out, APPROX_LOG=device == "cuda", N=4096)
    token_ids = torch.arange(4096, dtype=torch.int32, device=device)
    expected = gumbel_noise(keys, token_ids.expand(40, -1))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


# ---- whole rows ----


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("vocab_size", [3, 300, 1021])
@small_tiles
def test_unfiltered_rows_equal_the_torch_code(
    vocab_size: int, device: str, dtype: torch.dtype
) -> None:
    """Greedy and random rows side by side, vocabularies that fill no tile."""
    make_case(vocab_size, 40, vocab_size, 1.5, "", device, dtype).check()


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@small_tiles
def test_of_equal_logits_the_lowest_token_id_is_greedy(device: str, dtype: torch.dtype) -> None:
    """Within a tile and between tiles, for all-greedy batches and for greedy rows."""
    logits = torch.zeros(5, 1000, dtype=dtype)
    first = [0, 255, 256, 700, 998]
    for row, token in enumerate(first):
        logits[row, [token, 999]] = 1.0
    logits = logits.to(device)
    assert gumbel.gumbel_sample(logits).tolist() == first
    keys = row_keys(torch.arange(5), torch.arange(5)).to(device)
    zeros = torch.zeros(5, device=device)
    assert gumbel.gumbel_sample(logits, zeros, keys).tolist() == first


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filters", ["", "kp"])
@small_tiles
def test_rows_without_a_possible_token_harm_nobody(filters: str, device: str) -> None:
    """All -inf, or NaN, give some token of the vocabulary; other rows are as without them."""
    case = make_case(1, 4, 700, 1.0, filters, device)
    expected = case.triton()
    case.logits[1], case.logits[2] = -float("inf"), float("nan")
    sampled = case.triton()
    assert sampled[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert ((sampled >= 0) & (sampled < 700)).all()


# ---- filters ----


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("filters", ["k", "p", "m", "kp", "km", "pm", "kpm"])
@pytest.mark.parametrize(("vocab_size", "scale"), [(300, 0.01), (1021, 2.0)])
@small_tiles
def test_filtered_rows_equal_the_torch_code(
    vocab_size: int, scale: float, filters: str, device: str, dtype: torch.dtype
) -> None:
    """From rows whose nucleus is a token to such whose is the vocabulary."""
    num_rows = 200 if device == "cuda" else 8
    make_case(vocab_size, num_rows, vocab_size, scale, filters, device, dtype).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filters", ["k", "p", "kpm"])
@small_tiles
def test_rows_with_many_ties_equal_the_torch_code(filters: str, device: str) -> None:
    """A few dozen distinct logits over a vocabulary of 1,500: all ties survive or none."""
    make_case(5, 10, 1500, 1.5, filters, device, tied=True).check()


@pytest.mark.parametrize("device", DEVICES)
@small_tiles
def test_a_list_that_overflows_changes_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for 8 token ids nearly every row has to be searched whole: the same tokens."""
    for filters in ("p", "kpm"):
        case = make_case(6, 5, 900, 1.0, filters, device)
        expected = case.triton()
        monkeypatch.setattr(topk_topp_triton, "LIST_CAPACITY", 8)
        assert torch.equal(case.triton(), expected)
        monkeypatch.setattr(topk_topp_triton, "LIST_CAPACITY", SMALL_LIST)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@small_tiles
def test_a_search_of_several_rounds(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes that make the first guess a bad one, k too large for the groups' largest logits, lists
    of a few tokens: intervals of both signs, and some between two numbers that are neighbours."""
    monkeypatch.setattr(topk_topp_triton, "SHORT", 16)
    rng = np.random.default_rng(1)
    normal, wide = rng.normal(size=(2, 1500))
    rows = [
        normal,
        normal * 0.1 + (wide > 1) * 3,
        np.exp(wide),
        -rng.exponential(3, 1500),
        -np.sort(rng.exponential(3, 1500)),
        np.sign(wide) * 30 + normal,
        1 + rng.integers(0, 9, 1500) * 2.0**-23,
    ]
    logits = torch.from_numpy(np.array(rows * 3)).to(device, dtype)
    num_rows = len(logits)
    fraction = torch.arange(3, device=device).repeat_interleave(len(rows))
    case = Case(
        logits,
        row_keys(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64)).to(device),
        torch.full((num_rows,), 1000.0, device=device),  # a token too many would be drawn
        torch.tensor([180, 750, 1320], device=device, dtype=torch.int32)[fraction],
        None,
        None,
    )
    case.check(share_of_ties=0)
    case.k, case.p = None, torch.tensor([0.2, 0.9, 0.99], device=device)[fraction]
    for temperature in (1000.0, 3.0):
        case.temperature.fill_(temperature)
        case.check()


def odd_rows(vocab_size: int) -> torch.Tensor:
    """Rows that make pivots useless or leave few tokens."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(0, 1, (8, vocab_size)).astype(np.float32))
    rows[0] = 0.25  # all equal
    rows[1, 5:] = -float("inf")  # fewer tokens than k
    rows[2, 17] = -1e30  # the smallest logit says nothing about the others
    rows[3, ::2] = -float("inf")
    rows[4, :] = -3e38
    rows[4, [3, vocab_size - 1]] = 1.0
    rows[5] = torch.where(rows[5] > 0, 0.0, -0.0)  # equal numbers with different bits
    rows[6] *= 40
    rows[7, 1:] = -float("inf")  # one token
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("k", "p"), [(7, None), (None, 0.5), (600, 0.999), (1, None), (50, 1e-6)])
@small_tiles
def test_odd_rows_equal_the_torch_code(k: int | None, p: float | None, device: str) -> None:
    """Equal logits, -inf, outliers, zeros of both signs."""
    logits = odd_rows(700).to(device)
    Case(
        logits,
        row_keys(torch.arange(8), torch.arange(8)).to(device),
        torch.ones(8, device=device),
        None if k is None else torch.full((8,), k, dtype=torch.int32, device=device),
        None if p is None else torch.full((8,), p, device=device),
        None,
    ).check(share_of_ties=0)


@pytest.mark.parametrize("device", DEVICES)
@small_tiles
def test_exactly_the_kept_tokens_are_drawn(device: str) -> None:
    """Ties with the last kept token are drawn, the next lower logit never: over 30 seeds every one
    of six tokens of nearly equal probability is."""
    row = torch.full((600,), -50.0)
    row[[10, 300, 555]] = 2.0
    row[[11, 299, 301]] = 1.99  # ties at the threshold
    row[[12, 400]] = 1.98
    num_rows = 30
    case = Case(
        row.repeat(num_rows, 1).to(device),
        row_keys(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64)).to(device),
        torch.full((num_rows,), 1.5, device=device),
        torch.full((num_rows,), 4, dtype=torch.int32, device=device),
        None,
        None,
    )
    kept = {10, 300, 555, 11, 299, 301}
    assert set(case.triton().tolist()) == kept
    case.k, case.p = None, torch.full((num_rows,), 0.5, device=device)
    assert set(case.triton().tolist()) == kept


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("k", "p"), [(15, None), (None, 0.72)])
@small_tiles
def test_a_cut_between_logits_too_close_for_the_pivots(
    k: int | None, p: float | None, device: str
) -> None:
    """Of ten tokens a ten-thousandth apart, below ten others, the upper five are kept: the list is
    searched with what lies above it counted in."""
    num_rows = 24
    row = torch.full((600,), -float("inf"))
    row[torch.arange(10) * 59] = 2.0
    close = torch.arange(10) * 57 + 3
    row[close] = 1.0 + 1e-4 * torch.arange(10)
    case = Case(
        row.repeat(num_rows, 1).to(device),
        row_keys(torch.arange(num_rows), torch.ones(num_rows, dtype=torch.int64)).to(device),
        torch.full((num_rows,), 50.0, device=device),
        None if k is None else torch.full((num_rows,), k, dtype=torch.int32, device=device),
        None if p is None else torch.full((num_rows,), p, device=device),
        None,
    )
    drawn = set(case.triton().tolist())
    assert not drawn & set(close[:5].tolist())
    assert len(drawn & set(close[5:].tolist())) >= 3


@pytest.mark.parametrize("device", DEVICES)
@small_tiles
def test_a_rows_token_does_not_depend_on_the_other_rows(device: str) -> None:
    """Alone, and in a batch in reversed order: the same token."""
    case = make_case(9, 6, 900, 1.0, "kpm", device)
    expected = case.triton().tolist()

    def part(rows: list[int]) -> list[int]:
        columns = (case.logits, case.keys, case.temperature, case.k, case.p, case.log_min_p)
        return Case(*(column[rows] for column in columns)).triton().tolist()

    assert part([5, 4, 3, 2, 1, 0]) == expected[::-1]
    assert [part([row])[0] for row in range(6)] == expected


# ---- the sampler ----


@pytest.fixture
def _triton_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "use_triton", lambda _: True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("_triton_sampler")
def test_the_whole_sampler_equals_the_oracle(seed: int, device: str) -> None:
    """Mixed batches in which every row uses other features give the oracle's tokens."""
    rows, logits = random_batch(seed)
    metadata = make_metadata(rows, VOCAB, device)
    result = Sampler().forward(logits.clone().to(device), metadata)
    for i, row in enumerate(rows):
        raw = logits[i].double().numpy()
        expected = oracle.apply_penalties(oracle.apply_masks_and_bias(raw, row), row)
        if row.params.temperature == 0:
            token = int(np.argmax(expected))
        else:
            filtered = oracle.apply_filters(expected, row.params)
            token = oracle.seeded_draw(filtered, row.params.seed, row.position)
        assert result.sampled_token_ids[i].item() == token, (i, row)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("_triton_sampler")
def test_unseeded_rows_draw_what_they_draw_without_triton(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same engine seed, same steps: the same tokens, beside greedy rows and without any."""
    for temperature in (0.0, 1.0):
        rows = [Row(SamplingParams(temperature=t)) for t in (1.0, temperature, 1.0)]
        metadata = make_metadata(rows, 300, device)
        drawn = []
        for triton_or_not in (True, False):
            monkeypatch.setattr(sampler_module, "use_triton", lambda _, v=triton_or_not: v)
            sampler = Sampler(seed=3)
            logits = torch.linspace(-1, 1, 300, device=device).repeat(3, 1)
            steps = [sampler.forward(logits.clone(), metadata) for _ in range(5)]
            drawn.append([step.sampled_token_ids.flatten().tolist() for step in steps])
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("_triton_sampler")
def test_logits_of_half_precision_are_converted_only_if_torch_changes_them(device: str) -> None:
    """Temperature, min-p, top-k and top-p leave bfloat16 logits alone; a penalty does not."""
    converted: list[torch.dtype] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket._qualified_op_name == "aten::_to_copy" and out.numel() >= 900:
                converted.append(out.dtype)
            return out

    logits = torch.zeros(3, 300, dtype=torch.bfloat16, device=device)
    params = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "temperature": 0.7}
    for penalty, expected in ((0.0, []), (1.0, [torch.float32])):
        rows = [Row(SamplingParams(**params)), Row(SamplingParams(temperature=0))]
        rows.append(Row(SamplingParams(presence_penalty=penalty)))
        metadata = make_metadata(rows, 300, device)
        with Record():
            Sampler().forward(logits, metadata)
        assert converted == expected
        converted.clear()


@small_tiles
def test_a_chi_square_of_interpreted_draws() -> None:
    """500 draws from five tokens have the distribution asked for."""
    keys = row_keys(torch.arange(500), torch.zeros(500, dtype=torch.int64))
    logits = torch.from_numpy(np.tile(FIVE, (500, 1)).astype(np.float32))
    counts = np.bincount(gumbel.gumbel_sample(logits, None, keys).numpy()).astype(float)
    assert chi_square(counts, np.exp(oracle.log_softmax(FIVE))) < CHI2_999[4]


# ---- on a GPU, full size ----


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_hundred_thousand_draws_on_the_gpu_have_the_distribution(variant: dict) -> None:
    """Seeded and unseeded rows, chi-square below its 99.9th percentile."""
    params = SamplingParams(**variant)
    probs = np.exp(oracle.log_softmax(oracle.apply_filters(FIVE, params)))
    limit = CHI2_999[int((probs > 0).sum()) - 1]
    metadata = make_metadata([Row(params)] * 1000, 5, "cuda")
    logits = torch.from_numpy(np.tile(FIVE, (1000, 1)).astype(np.float32)).cuda()
    for seeded in (False, True):
        sampler, counts = Sampler(seed=0), torch.zeros(5, dtype=torch.int64, device="cuda")
        for step in range(100):
            if seeded:
                metadata.seeds = torch.arange(1000, device="cuda") + step * 1000
                metadata.positions = torch.ones_like(metadata.seeds)
            sampled = sampler.forward(logits, metadata).sampled_token_ids.flatten()
            counts += torch.bincount(sampled, minlength=5)
        assert chi_square(counts.cpu().numpy().astype(float), probs) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("filters", ["", "k", "p", "m", "kp", "kpm"])
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0, 10.0])
def test_full_size_batches_equal_the_torch_code(
    scale: float, filters: str, dtype: torch.dtype
) -> None:
    """256 rows of 151,936 logits, from flat to peaked, with k up to 1,000 and up to all."""
    for max_k in (1000, None):
        case = make_case(3, 256, 151_936, scale, filters, "cuda", dtype, max_k=max_k)
        case.check()
        few = [5, 77, 128]
        columns = (case.logits, case.keys, case.temperature, case.k, case.p, case.log_min_p)
        alone = Case(*(column if column is None else column[few] for column in columns))
        assert torch.equal(alone.triton(), case.triton()[few])


@pytest.mark.gpu
@pytest.mark.parametrize("filters", ["", "kpm"])
def test_the_kernels_can_be_captured_in_a_cuda_graph(filters: str) -> None:
    """A replay with other logits and keys in the same memory samples as a launch does."""
    case = make_case(1, 17, 50_257, 1.0, filters, "cuda")
    case.triton()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = TopKTopPSampler().forward_cuda(
            case.logits, case.keys, case.k, case.p, case.temperature, case.log_min_p
        )
    for seed in (2, 3):
        other = make_case(seed, 17, 50_257, 1.0, filters, "cuda")
        case.logits.copy_(other.logits)
        case.keys.copy_(other.keys)
        graph.replay()
        assert torch.equal(sampled, case.triton())


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device() -> None:
    """With every feature in use, and an output history on the device, nothing is read back."""
    rows, logits = random_batch(2)
    metadata = make_metadata(rows, VOCAB, "cuda")
    matrix = make_output_matrix(
        np.array([[*row.output, *[0] * 20][:20] for row in rows], dtype=np.int32),
        np.zeros(len(rows), dtype=np.int32),
        np.array([len(row.output) for row in rows], dtype=np.int32),
        VOCAB,
    )
    metadata.output_token_ids_tensor = torch.from_numpy(matrix).cuda()
    metadata.last_sampled_token_ids = torch.full((len(rows),), -1, device="cuda")
    logits = logits.cuda()
    expected = Sampler().forward(logits.clone(), metadata).sampled_token_ids
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = Sampler().forward(logits, metadata).sampled_token_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(sampled, expected)
