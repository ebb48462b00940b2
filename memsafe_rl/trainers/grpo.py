"""GRPO and RLOO: policy trainers whose advantages are relative to a group."""

from __future__ import annotations

from memsafe_rl.config.grpo import GRPOConfig, RLOOConfig
from memsafe_rl.trainers.policy_trainer import PolicyTrainer


class GRPOTrainer(PolicyTrainer):
    """Trains a language model with Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300).

    Takes TRL's arguments with TRL's meanings; how the work is cut to fit memory is the memory policy's business and
    never changes what is learnt.

    Args:
        model: a name or path of a causal LM or an encoder-decoder (T5, BART), or a model (a `PeftModel` too).
        reward_funcs: a reward function or a list of them: callables, sync or async, reward models, or their names;
            None where environments give the reward.
        args: the configuration; None for the defaults.
        train_dataset: a `datasets` dataset with a `prompt` column, plain or conversational.
        eval_dataset: prompts for evaluation, or a dict of such datasets.
        processing_class: the tokenizer; None to load it with the model.
        reward_processing_classes: tokenizers of the reward models.
        callbacks: callbacks of transformers' `TrainerCallback` form.
        optimizers: an optimizer and a schedule; None for those the configuration names.
        quantization_config: quantises the base model while it is loaded; needs `peft_config`.
        peft_config: adds an adapter, which alone is trained.
        tools: functions, sync or async, with type hints and Google docstrings, that the model may call; every call is
            answered and the model goes on.
        rollout_func: `(prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", ...}`, draws completions in
            place of the library.
        environment_factory: takes nothing and makes an environment: a `memsafe_rl.Environment`, or one in TRL's form
            (`reset(**columns)`, maybe `get_reward()`, and methods that are tools); or a mapping of such by the
            dataset's column "environment".
        memory_policy: cuts the work to fit memory: a policy, or "adaptive" (also None), "ladder", or the name of a
            preset for a card: "24GB+", "12-24GB", "8-12GB", "under-8GB".

    Raises:
        ConfigError: a setting cannot work; the message names it, its value and the remedy.
        DataError: the dataset cannot be used.
    """

    config_class = GRPOConfig


class RLOOTrainer(PolicyTrainer):
    """Trains a model with REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740), with TRL 1.16's meanings.

    Rewards pay for the KL to the reference (`beta`), and ratios are of whole completions, clipped as in PPO. Everything
    else, from the arguments and errors to what happens when memory runs out, is as in `GRPOTrainer`.
    """

    config_class = RLOOConfig
