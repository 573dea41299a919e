"""vLLM's answers beside transformers'."""

import models
import multiplied_out
import torch


def _by_position(rows: list[torch.Tensor]) -> torch.Tensor:
    """Root mean square over the vocabulary."""
    return torch.cat(rows).square().mean(1).sqrt()


def _typical(rows: list[torch.Tensor]) -> float:
    """The median position.

    Where two experts are all but equally good, noise selects the other one: such positions are far off, in repetitions
    of the reference as well, and there are few of them.
    """
    return _by_position(rows).median().item()


def assert_same(a: dict, b: dict) -> None:
    """The same tokens, and the same bits of all log-probabilities."""
    for each in (a, b):
        assert "error" not in each, each["error"]
    assert a["outputs"] == b["outputs"]
    assert len(a["logprobs"]) == len(b["logprobs"])
    assert all(map(torch.equal, a["logprobs"], b["logprobs"]))


def kl_divergences(a: dict, b: dict) -> torch.Tensor:
    """Of b's log-probabilities from a's, at all positions with the same tokens before them."""
    pairs = []
    for x, y, s, t in zip(a["logprobs"], b["logprobs"], a["outputs"], b["outputs"]):
        same = next((i for i, (u, v) in enumerate(zip(s, t)) if u != v), len(s)) + len(x) - len(s) + 1
        pairs.append((x[:same].exp() * (x[:same] - y[:same])).sum(-1))
    return torch.cat(pairs)


def _differences(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x - y for x, y in zip(a, b)]


def check_rows(name: str, got: list[torch.Tensor], exact: list[torch.Tensor], rounded: list[torch.Tensor]) -> None:
    """Log-probabilities of a float32 model, its inputs rounded to int8 alone: as :func:`check` has it, which says why.

    Args:
        name: for figures.
        got, exact, rounded: rows [positions, vocabulary]: vLLM's, the reference's, and those with int8 inputs.
    """
    noise, off = _typical(_differences(rounded, exact)), _typical(_differences(got, exact))
    spread = torch.cat(exact).std().item()
    figures = f"{name}: off by {off:.4f}, int8 {noise:.4f}, spread {spread:.3f}"
    print(figures)
    assert noise < spread / 4, f"the noise hides what is to be seen; {figures}"
    assert off <= 2**0.5 * noise, figures


def activation_group(case: models.Case, stock: bool = False) -> int:
    """Values of an input that share a scale, if nothing is asked for: 32 of weight-only models, else all (-1)."""
    return 32 if case.inputs == "none" and not stock else -1


def check(
    case: models.Case,
    directory,
    prompts: list[list[int]],
    result: dict,
    ranks: int = 1,
    stock: bool = False,
    size: int | None = None,
    few_layers: bool = True,
) -> None:
    """Compares log-probabilities of the whole vocabulary at every position, and the tokens that were chosen.

    Int8 inputs and a 16-bit dtype are two sources of noise. Each is measured, in the very model and on the very tokens,
    by code that shares nothing with the package. vLLM has both, but rounds at other places than the measurement did, so
    its noise is of their size and not the same; hence sqrt(2), the difference of two independent noises of one size. A
    wrong expert, scale, bias, order of gate and up or slice of a rank is off by the spread of the log-probabilities
    themselves, an order of magnitude more. ``size``: the activation group, if it is not that of the case.
    ``few_layers``: some position has no value that rounds otherwise than in the measurement; each has in 20 layers.
    """
    assert "error" not in result, result["error"]
    sequences = [prompt + output for prompt, output in zip(prompts, result["outputs"])]
    exact_model = multiplied_out.load(directory / "reference", torch.float32)
    exact = multiplied_out.logprobs(exact_model, sequences)
    int8_attention = case.attention != "float"
    if stock and case.inputs == "none":
        # vLLM itself rounds the inputs of linear layers of weight-only models where it can use AMX.
        int8_attention = result["amx"] and case.dtype == "bfloat16"
    int8 = multiplied_out.quantized_matrices(exact_model, int8_attention, case.lm_head)
    size = activation_group(case, stock) if size is None else size
    rounded = multiplied_out.logprobs(exact_model, sequences, int8, size)
    dtype = getattr(torch, case.dtype)
    narrow = exact
    if dtype != torch.float32:
        narrow = multiplied_out.logprobs(multiplied_out.load(directory / "reference", dtype), sequences)

    got = result["logprobs"]
    assert [row.shape for row in got] == [row.shape for row in exact]
    of_int8, of_dtype = _differences(rounded, exact), _differences(narrow, exact)
    noise = (_typical(of_int8) ** 2 + _typical(of_dtype) ** 2) ** 0.5
    off = _typical(_differences(got, exact))
    spread = torch.cat(exact).std().item()
    far = 4 * noise
    switched = [(_by_position(rows) > far).float().mean().item() for rows in (of_int8, of_dtype)]
    astray = (_by_position(_differences(got, exact)) > far).float().mean().item()
    allowed = 0.1 + sum(switched)
    with_a_wrong_expert = sum(switched) + case.share_of_an_expert * (1 - sum(switched))
    tokens = [
        (a[i, token] - b[i, token]).abs()
        for a, b, prompt in zip(got, exact, prompts)
        for i, token in enumerate(prompt[1:])
    ]
    figures = (
        f"{case.name}: off by {off:.4f}, int8 {_typical(of_int8):.4f}, dtype {_typical(of_dtype):.4f}, "
        f"spread {spread:.3f}, "
        f"astray {astray:.3f}, int8 {switched[0]:.3f}, dtype {switched[1]:.3f}, "
        f"from int8 emulation {_typical(_differences(got, rounded)):.4f}, "
        f"prompt's tokens {torch.stack(tokens).mean():.4f}"
    )
    print(figures)
    assert noise < spread / 4, f"the noise hides what is to be seen; {figures}"
    assert off <= 2**0.5 * noise, figures
    same_roundings = few_layers and case.dtype == "float32" and ranks == 1 and not stock
    if same_roundings and not case.model.startswith("deepseek"):
        # The same roundings to int8, except of what float32 arithmetic puts on the other side of a tie. That one step
        # moves what attends to it, and so other values across their ties, but not every position: a tenth are the same
        # to the last digits, where other arithmetic in any layer leaves none. (DeepSeek's attention multiplies one
        # matrix out of order when it decodes; each of two ranks rounds its half of a row by that half's range; vLLM's
        # own operators round otherwise.)
        assert _by_position(_differences(got, rounded)).quantile(0.1) <= 0.02 * noise, figures

    # Positions where another expert was selected are as few as the noise makes in the reference itself, and what
    # attends to them: fewer than if one expert of the last layer is wrong, which a median does not see.
    assert allowed < with_a_wrong_expert, f"the noise hides a wrong expert; {figures}"
    assert astray <= allowed, f"{astray:.0%} of the positions are far off; {figures}"

    # Elsewhere a chosen token is the most likely one, or as good as that: two log-probabilities of the vocabulary are
    # off by less than 5 root mean squares each, and those positions by less than `far`.
    equal = total = 0
    for prompt, output, rows, got_rows in zip(prompts, result["outputs"], exact, got):
        for i, token in enumerate(output):
            position = len(prompt) - 1 + i
            row = rows[position]
            off_here = (got_rows[position] - row).square().mean().sqrt().item()
            gap = (row.max() - row[token]).item()
            if off_here <= far:
                tie = 2 * 5 * off_here
                assert gap <= tie, f"token {token} is {gap:.3f} less likely than the best, tie {tie:.3f}; {figures}"
            equal += gap == 0
            total += 1
    assert equal >= 0.8 * total, f"{equal} of {total} tokens are the most likely ones; {figures}"
