"""Log-probs in tiles against the naive full-logits form, in value, gradient and bytes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.ops.logprobs import choice_logprobs, pad_rows, token_logprobs
from memsafe_rl.types import LinearHead, TokenDistribution

TOKENS, WIDTH, VOCAB = 11, 6, 37
EXACT = {"rtol": 0, "atol": 1e-12}


def leaf(*shape, dtype=torch.float64, scale=1.0):
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def naive(hidden, weight, bias, tokens, temperature=1.0, scale=1.0, cap=None):
    logits = linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def parts(dtype=torch.float64, tokens=TOKENS, vocab=VOCAB):
    torch.manual_seed(0)
    return (
        leaf(tokens, WIDTH, dtype=dtype),
        leaf(vocab, WIDTH, dtype=dtype),
        leaf(vocab, dtype=dtype),
        torch.randint(vocab, (tokens,)),
    )


def scores(hidden, tokens, head, temperature=1.0, tile=4, with_entropy=True):
    distribution = TokenDistribution(hidden, tokens, (len(tokens),), head)
    return token_logprobs(distribution, temperature=temperature, tile=tile, with_entropy=with_entropy)


@pytest.mark.parametrize("kind", ["linear", "function", "fixed tiles"])
@pytest.mark.parametrize("tile", [1, 4, 100])
@pytest.mark.parametrize(("scale", "cap", "temperature"), [(1.0, None, 1.0), (1.7, 2.5, 1.3)])
def test_log_probs_of_the_likeliest_tokens_and_of_given_ones_equal_the_naive_form(kind, tile, scale, cap, temperature):
    hidden, weight, bias, tokens = parts()
    logits = linear(hidden, weight, bias) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    everything = (logits / temperature).log_softmax(-1)
    likeliest, where = everything.topk(5)
    bounded = (lambda values: values) if cap is None else (lambda values: cap * torch.tanh(values / cap))
    head = LinearHead(weight, bias, scale, cap)
    if kind == "function":
        head = lambda states: bounded(linear(states, weight, bias) * scale)  # noqa: E731
    distribution = TokenDistribution(hidden, tokens, (len(tokens),), head, kind == "fixed tiles")
    how = {"temperature": temperature, "tile": tile}
    ids, found = choice_logprobs(distribution, 5, **how)
    assert torch.equal(ids, where)
    torch.testing.assert_close(found, likeliest, **EXACT)
    assert not found.requires_grad
    given = torch.randint(VOCAB, (TOKENS, 3))
    ids, found = choice_logprobs(distribution, given, **how)
    assert torch.equal(ids, given)
    torch.testing.assert_close(found, everything.gather(1, given), **EXACT)
    assert choice_logprobs(distribution, 1000, **how)[1].shape == (TOKENS, VOCAB)


def gradients(outputs, inputs, weights):
    total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs, allow_unused=True)


@pytest.mark.parametrize("tile", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("scale", "cap", "temperature"), [(1.0, None, 1.0), (0.3, None, 0.7), (1.7, 2.5, 1.3)])
def test_values_and_gradients_equal_the_naive_form(tile, with_bias, scale, cap, temperature):
    hidden, weight, bias, tokens = parts()
    bias = bias if with_bias else None
    expected = naive(hidden, weight, bias, tokens, temperature, scale, cap)
    actual = scores(hidden, tokens, LinearHead(weight, bias, scale, cap), temperature, tile)
    torch.testing.assert_close(actual, expected, **EXACT)
    leaves = [value for value in (hidden, weight, bias) if value is not None]
    weights = torch.randn(2, TOKENS, dtype=torch.float64)
    torch.testing.assert_close(gradients(actual, leaves, weights), gradients(expected, leaves, weights), **EXACT)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("kind", ["plain", "capped", "function"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(kind, with_entropy):
    hidden, weight, bias, tokens = parts(tokens=5, vocab=7)

    def run(hidden, weight, bias):
        head = LinearHead(weight, bias, 0.8, 2.0 if kind == "capped" else None)
        if kind == "function":
            head = lambda states: linear(states, weight, bias)  # noqa: E731
        outputs = scores(hidden, tokens, head, 0.9, tile=2, with_entropy=with_entropy)
        return outputs if with_entropy else outputs[0]

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_output_alone(which):
    hidden, weight, bias, tokens = parts()
    expected = torch.autograd.grad(naive(hidden, weight, bias, tokens)[which].sum(), [hidden, weight, bias])
    for head in (LinearHead(weight, bias), lambda states: linear(states, weight, bias)):
        actual = torch.autograd.grad(scores(hidden, tokens, head)[which].sum(), [hidden, weight, bias])
        torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (1, 2)])
def test_only_the_trained_parts_get_a_gradient(trained):
    values = parts()
    leaves = [values[index] for index in trained]
    for index in range(3):
        values[index].requires_grad_(index in trained)
    hidden, weight, bias, tokens = values
    weights = torch.randn(2, TOKENS, dtype=torch.float64)
    expected = gradients(naive(hidden, weight, bias, tokens), leaves, weights)
    actual = gradients(scores(hidden, tokens, LinearHead(weight, bias)), leaves, weights)
    torch.testing.assert_close(actual, expected, **EXACT)


def test_a_head_that_is_a_function_equals_the_linear_one():
    hidden, weight, bias, tokens = parts()
    leaves = [hidden, weight, bias]
    weights = torch.randn(2, TOKENS, dtype=torch.float64)
    expected = scores(hidden, tokens, LinearHead(weight, bias), 0.6)
    actual = scores(hidden, tokens, lambda states: linear(states, weight, bias), 0.6)
    torch.testing.assert_close(actual, expected, **EXACT)
    torch.testing.assert_close(gradients(actual, leaves, weights), gradients(expected, leaves, weights), **EXACT)


@pytest.mark.parametrize("as_function", [False, True])
def test_a_token_that_cannot_be_drawn_leaves_everything_finite(as_function):
    hidden, weight, bias, tokens = parts()
    with torch.no_grad():
        bias[5] = -torch.inf
    tokens = torch.where(tokens == 5, 6, tokens)
    head = (lambda states: linear(states, weight, bias)) if as_function else LinearHead(weight, bias)
    logprobs, entropies = scores(hidden, tokens, head)
    kept = [index for index in range(VOCAB) if index != 5]
    expected = naive(hidden, weight[kept], bias[kept], torch.where(tokens > 5, tokens - 1, tokens))
    torch.testing.assert_close((logprobs, entropies), expected, **EXACT)
    (logprobs.sum() + entropies.sum()).backward()
    assert weight.grad.isfinite().all()
    assert hidden.grad.isfinite().all()


def test_no_gradient_saves_nothing():
    hidden, weight, bias, tokens = parts()
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None)
    with torch.no_grad(), hooks:
        logprobs, entropies = scores(hidden, tokens, LinearHead(weight, bias))
    assert not saved
    assert logprobs.grad_fn is None
    assert entropies.grad_fn is None


@pytest.mark.parametrize("as_function", [False, True])
def test_no_tokens_give_empty_scores_and_zero_gradients(as_function):
    hidden, weight, bias, tokens = parts(tokens=0)
    head = (lambda states: linear(states, weight, bias)) if as_function else LinearHead(weight, bias)
    logprobs, entropies = scores(hidden, tokens, head)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert hidden.grad.shape == (0, WIDTH)
    assert not weight.grad.any()


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_autocast_computes_what_a_linear_layer_would(as_function, with_bias):
    hidden, weight, bias, tokens = parts(torch.float32)
    bias = bias if with_bias else None
    leaves = [value for value in (hidden, weight, bias) if value is not None]
    head = (lambda states: linear(states, weight, bias)) if as_function else LinearHead(weight, bias)
    weights = torch.randn(2, TOKENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = naive(hidden, weight, bias, tokens)
        actual = scores(hidden, tokens, head)
    assert actual[0].dtype == torch.float32
    # The bf16 product is the same to the bit; only float32 sums differ.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    # The naive form rounds the logits' gradient to bf16 (2**-8).
    torch.testing.assert_close(
        gradients(actual, leaves, weights), gradients(expected, leaves, weights), rtol=2e-2, atol=2e-2
    )


def test_bfloat16_weights_get_a_gradient_summed_in_float32():
    torch.manual_seed(0)
    hidden, weight = leaf(512, WIDTH, dtype=torch.bfloat16), leaf(VOCAB, WIDTH, dtype=torch.bfloat16)
    tokens = torch.randint(VOCAB, (512,))
    wide = [value.detach().double().requires_grad_() for value in (hidden, weight)]
    scores(hidden, tokens, LinearHead(weight), tile=1)[0].sum().backward()
    naive(*wide, None, tokens)[0].sum().backward()
    # One rounding of the result (2**-9 relative) and of the logits (2**-9); 512 bf16 sums would lose far more.
    assert weight.grad.dtype == torch.bfloat16
    assert (weight.grad.double() - wide[1].grad).norm() / wide[1].grad.norm() < 4e-3


def test_compute_dtype_of_the_head_wins():
    hidden, weight, _, tokens = parts(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = scores(hidden, tokens, LinearHead(weight, compute_dtype=torch.float32))
    expected = naive(hidden.float(), weight.float(), None, tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("as_function", [False, True])
def test_runs_on_fake_tensors(as_function):
    with FakeTensorMode():
        hidden, weight = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
        head = (lambda states: linear(states, weight)) if as_function else LinearHead(weight)
        logprobs, entropies = scores(hidden, torch.zeros(TOKENS, dtype=torch.int64), head)
        padded = pad_rows(logprobs, (4, 7))
        (padded.sum() + entropies.sum()).backward()
    assert padded.shape == (2, 7)
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize(("tile", "temperature"), [(0, 1.0), (4, 0.0), (4, float("nan"))])
def test_settings_that_cannot_work_are_refused(tile, temperature):
    hidden, weight, _, tokens = parts()
    with pytest.raises(ConfigError, match="Set `"):
        scores(hidden, tokens, LinearHead(weight), temperature, tile)


class LargestAllocation(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor any operator gave."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("as_function", [False, True])
def test_logits_never_exceed_a_tile(as_function):
    vocab, tokens, tile = 4096, 96, 8
    hidden, weight = leaf(tokens, WIDTH, dtype=torch.float32), torch.randn(vocab, WIDTH)
    taken = torch.randint(vocab, (tokens,))
    head = (lambda states: linear(states, weight)) if as_function else LinearHead(weight)
    with LargestAllocation() as watch:
        logprobs, entropies = scores(hidden, taken, head, tile=tile)
        (logprobs.sum() + entropies.sum()).backward()
    assert watch.largest == tile * vocab * 4


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "mm" in func.__name__
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("temperature", "scale", "cap"), [(1.0, 1.0, None), (0.7, 1.3, None), (0.7, 1.3, 2.0)])
def test_a_frozen_head_is_read_twice_and_in_forward_only(temperature, scale, cap, with_entropy):
    torch.manual_seed(0)
    hidden, weight, bias, tokens = parts()
    weight, bias = weight.detach(), bias.detach()
    head = LinearHead(weight, bias, scale, cap)
    upstream = torch.randn(TOKENS, dtype=torch.float64)
    with Products() as forward:
        logprobs, _ = scores(hidden, tokens, head, temperature, TOKENS, with_entropy)
    with Products() as backward:
        (gradient,) = torch.autograd.grad(logprobs, hidden, upstream)
    assert (forward.count, backward.count) == (2, 0)
    expected, _ = naive(hidden, weight, bias, tokens, temperature, scale, cap)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden, upstream)[0], **EXACT)
    with torch.no_grad(), Products() as unlearnt:
        scores(hidden, tokens, head, temperature, TOKENS, with_entropy)
    assert unlearnt.count == 1


TILE_BYTES, HEAD_BYTES = 16 * 20_000 * 4, 20_000 * 32 * 4


@pytest.mark.parametrize(
    ("kind", "tiles", "heads"),
    [("frozen", 1.1, 0), ("trained", 1.1, 1), ("capped, entropy trained", 1.25, 0), ("function", 2.25, 0)],
)
def test_peak_is_a_tile_and_the_gradient_of_the_head(kind, tiles, heads):
    torch.manual_seed(0)
    hidden, weight = torch.randn(96, 32, requires_grad=True), torch.randn(20_000, 32)
    weight.requires_grad_(kind == "trained")
    tokens = torch.randint(20_000, (96,))
    head = LinearHead(weight, soft_cap=3.0 if "capped" in kind else None)
    if kind == "function":
        head = lambda states: linear(states, weight)  # noqa: E731
    with SimulatedMemory() as memory:
        logprobs, entropies = scores(hidden, tokens, head, tile=16)
        (logprobs.sum() + (entropies.sum() if "entropy" in kind else 0)).backward()
        peak = memory.peak_bytes
    assert peak <= tiles * TILE_BYTES + heads * HEAD_BYTES


def test_pad_rows_lays_rows_out_and_carries_gradients():
    flat = torch.arange(6.0, requires_grad=True)
    padded = pad_rows(flat, (2, 0, 3, 1), fill=-1.0)
    expected = torch.tensor([[0.0, 1.0, -1.0], [-1.0, -1.0, -1.0], [2.0, 3.0, 4.0], [5.0, -1.0, -1.0]])
    assert torch.equal(padded, expected)
    (padded * torch.arange(12.0).view(4, 3)).sum().backward()
    assert flat.grad.tolist() == [0.0, 1.0, 6.0, 7.0, 8.0, 9.0]


def test_pad_rows_without_rows():
    assert pad_rows(torch.zeros(0), ()).shape == (0, 0)
    assert pad_rows(torch.zeros(0), (0, 0)).shape == (2, 0)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_do_not_round_more_than_many(rows):
    torch.manual_seed(0)
    vocab, width = 50_000, 64
    # All entries of one sign, as a gradient's sum over a large vocabulary can be: rounding adds up in one direction.
    hidden, weight = torch.randn(rows, width).abs() * 0.02, torch.rand(vocab, width)
    tokens = torch.randint(vocab, (rows,))
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype)]
        (logprobs, _) = scores(leaves[0], tokens, LinearHead(leaves[1]), tile=64, with_entropy=False)
        found.append(torch.autograd.grad(logprobs.sum(), leaves[0])[0].double())
    assert (found[0] - found[1]).norm() < 1e-6 * found[1].norm()
