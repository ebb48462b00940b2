"""Every policy loss written as loops over rows and tokens, straight from its formula; slow, and obviously right."""

import math
from dataclasses import fields, replace

import torch

from memsafe_rl.types import Denominators, LossInputs, LossSettings


def counts_of(inputs: LossInputs) -> Denominators:
    """Counts what `Denominators` must hold, from the whole step's inputs."""
    active = inputs.mask_BT if inputs.entropy_mask_BT is None else inputs.mask_BT * inputs.entropy_mask_BT
    return Denominators(len(inputs.mask_BT), int(inputs.mask_BT.sum()), int(active.sum()))


def rows_of(inputs: LossInputs, rows: list[int]) -> LossInputs:
    """Cuts some rows out of a micro-batch, padded to their own longest."""
    width = max(1, *(_last(inputs, row) for row in rows))
    cut = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            value = value[rows] if value.dim() == 1 or value.shape[1] == 1 else value[rows, :width]
        cut[field.name] = value
    return replace(inputs, **cut)


def _last(inputs: LossInputs, row: int) -> int:
    counted = inputs.mask_BT[row].nonzero()
    return int(counted.max()) + 1 if len(counted) else 0


def at(value: torch.Tensor | None, row: int, column: int) -> torch.Tensor | None:
    if value is None:
        return None
    if value.dim() == 1:
        return value[row]
    return value[row, 0] if value.shape[1] == 1 else value[row, column]


def naive_loss(inputs: LossInputs, settings: LossSettings, counts: Denominators) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss and the sum of its terms' absolute values."""
    terms = []
    for row in range(len(inputs.mask_BT)):
        columns = [t for t in range(inputs.mask_BT.shape[1]) if inputs.mask_BT[row, t]]
        terms += [_token_term(inputs, settings, counts, row, t, columns) for t in columns]
    if inputs.entropy_coef:
        for row, column in inputs.mask_BT.nonzero().tolist():
            active = 1.0 if inputs.entropy_mask_BT is None else inputs.entropy_mask_BT[row, column]
            bonus = inputs.entropies_BT[row, column] * active / counts.entropy_tokens
            terms.append(-inputs.entropy_coef * bonus)
    stacked = torch.stack(terms)
    return stacked.sum(), stacked.detach().abs().sum()


def _token_term(inputs, settings, counts, row, column, columns):
    logprob, advantage = inputs.logprobs_BT[row, column], at(inputs.advantages_B, row, column)
    old = inputs.logprobs_BT.detach() if inputs.old_logprobs_BT is None else inputs.old_logprobs_BT
    log_ratios = {t: inputs.logprobs_BT[row, t] - old[row, t] for t in columns}
    if settings.importance_sampling_level == "token":
        ratio = log_ratios[column].exp()
    else:
        shared = len(columns) if settings.importance_sampling_level == "sequence" else 1
        ratio = (sum(log_ratios.values()) / shared).exp()
    loss = _surrogate(inputs, settings, row, column, columns, ratio, advantage, logprob, log_ratios)
    if settings.off_policy_mask_threshold is not None and advantage < 0:
        sampler = old if inputs.sampling_logprobs_BT is None else inputs.sampling_logprobs_BT
        gaps = [sampler[row, t] - inputs.logprobs_BT[row, t].detach() for t in columns]
        moved = sum(0.0 if math.isnan(gap) else float(gap) for gap in gaps) / len(columns)
        loss = loss * (moved <= settings.off_policy_mask_threshold)
    if inputs.entropy_mask_BT is not None:
        loss = loss * inputs.entropy_mask_BT[row, column]
    if inputs.importance_weights_BT is not None and settings.loss_type != "vespo":
        loss = loss * at(inputs.importance_weights_BT, row, column)
    if settings.beta:
        gap = inputs.ref_logprobs_BT[row, column] - logprob
        loss = loss + settings.beta * (gap.exp() - gap - 1) * (ratio if settings.use_bias_correction_kl else 1)
    return loss / _divisor(settings, counts, len(columns))


def _divisor(settings, counts, row_tokens):
    return {
        "grpo": counts.rows * row_tokens,
        "rloo": counts.rows * row_tokens,
        "sapo": counts.rows * row_tokens,
        "gmpo": counts.rows * row_tokens,
        "luspo": counts.rows,
        "dr_grpo": counts.rows * settings.max_completion_length,
    }.get(settings.loss_type, counts.tokens)


def _surrogate(inputs, settings, row, column, columns, ratio, advantage, logprob, log_ratios):
    if settings.loss_type == "cispo":
        return -min(float(ratio.detach()), settings.epsilon_high) * advantage * logprob
    if settings.loss_type == "sapo":
        tau = settings.sapo_temperature_pos if advantage > 0 else settings.sapo_temperature_neg
        return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * advantage
    if settings.loss_type == "vespo":
        positive = bool(advantage >= 0)
        power = settings.vespo_k_pos if positive else settings.vespo_k_neg
        decay = settings.vespo_lambda_pos if positive else settings.vespo_lambda_neg
        log_weight = sum(float(value.detach()) for value in log_ratios.values())
        if inputs.importance_weights_BT is not None:
            single = inputs.importance_weights_BT.shape[1] == 1
            for t in columns[:1] if single else columns:
                log_weight += math.log(at(inputs.importance_weights_BT, row, t))
        weight = math.exp(log_weight)
        return -math.exp(decay) * weight**power * math.exp(-decay * weight) * advantage * logprob
    if settings.loss_type == "gmpo":
        mask = inputs.entropy_mask_BT
        kept = [t for t in columns if mask is None or mask[row, t]]
        held = [_held(log_ratios[t], settings, at(inputs.advantages_B, row, t)) for t in kept]
        # What multiplies each of the row's tokens; those that are not marked count for nothing later.
        return -(sum(held) / max(1, len(kept))).exp() * advantage * len(columns) / len(kept) if kept else 0 * logprob
    marked = 0.0 if inputs.marks_BT is None else float(inputs.marks_BT[row, column])
    if settings.loss_type == "kl_cov":
        return -ratio * advantage + settings.kl_cov_coef * marked * log_ratios[column].abs()
    if settings.loss_type in ("dppo", "dppo_kl"):
        new, old = (math.exp(value.detach()) for value in (logprob, logprob - log_ratios[column]))
        up = new > old
        if settings.loss_type == "dppo":
            distance = abs(new - old)
        else:
            distance = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
        if advantage > 0:
            masked = up and distance > settings.epsilon_high
        else:
            masked = not up and distance > settings.epsilon_low
        weight = float(ratio.detach()) if settings.delta is None else min(float(ratio.detach()), settings.delta)
        return -(0.0 if masked else weight) * advantage * logprob
    low, high = 1 - settings.epsilon_low, 1 + settings.epsilon_high
    clipped = min(max(float(ratio.detach()), low), high) if not low <= ratio <= high else ratio
    bounded = ratio if settings.delta is None or ratio <= settings.delta else settings.delta
    first, second = bounded * advantage, clipped * advantage
    loss = -(first if first <= second else second)
    return loss * (1 - marked) if settings.loss_type == "clip_cov" else loss


def _held(log_ratio, settings, advantage):
    if advantage > 0:
        return log_ratio if log_ratio <= settings.epsilon_high else log_ratio * 0 + settings.epsilon_high
    return log_ratio if log_ratio >= -settings.epsilon_low else log_ratio * 0 - settings.epsilon_low
