"""What scripts written for transformers' and TRL's trainers expect of one, beside training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler

if TYPE_CHECKING:
    from memsafe_rl.config.base import TrainerConfig

_ABSENT = {
    "push_to_hub": "nothing is pushed to a hub; save_model() writes a folder that huggingface_hub can upload",
    "hub_model_id": "nothing is pushed to a hub",
    "create_model_card": "no model card is written; save_model() writes weights and tokenizer",
    "compute_loss": "losses are pure functions; pass your own as loss_type (docs/extending.md)",
    "predict": "use evaluate(), or model.generate()",
    "get_train_dataloader": "prompts are read by position, without a dataloader; pass train_dataset",
    "get_eval_dataloader": "prompts are read by position, without a dataloader; pass eval_dataset",
    "create_optimizer": "train() makes it from `optim`; pass optimizers=(optimizer, schedule) for another",
    "hyperparameter_search": "build one trainer a trial",
}
_OVERRIDES_IGNORED = ("compute_loss", "training_step", "_generate_and_score_completions", "_prepare_inputs")


class TrainerSurface:
    """Methods and attributes of transformers' `Trainer` that need nothing of the loop."""

    args: TrainerConfig
    model: Any
    processing_class: Any
    accelerator: Accelerator
    state: TrainerState
    _callbacks: CallbackHandler

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _OVERRIDES_IGNORED:
            if name in cls.__dict__:
                reason = _ABSENT.get(name, "the loop has no such step")
                raise TypeError(f"{cls.__name__}.{name} would never be called: {reason}.")

    def __getattr__(self, name: str) -> Any:
        reason = _ABSENT.get(name)
        told = f": {reason}." if reason else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{told}")

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, under its older name."""
        return self.processing_class

    @property
    def callback_handler(self) -> CallbackHandler:
        """Calls the callbacks."""
        return self._callbacks

    def add_callback(self, callback: Any) -> None:
        """Adds a callback of transformers' `TrainerCallback` form."""
        self._callbacks.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, given as an instance or a class."""
        self._callbacks.remove_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback, given as an instance or a class, and gives it back."""
        return self._callbacks.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Tells whether this is the first of all processes."""
        return bool(self.accelerator.is_main_process)

    def is_local_process_zero(self) -> bool:
        """Tells whether this is the first process of its machine."""
        return bool(self.accelerator.is_local_main_process)

    def save_state(self) -> None:
        """Writes `trainer_state.json` into the run's folder."""
        if self.is_world_process_zero():
            Path(self.args.output_dir or ".").mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(Path(self.args.output_dir or ".") / "trainer_state.json"))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints metrics, a line each."""
        if self.is_world_process_zero():
            lines = [f"  {name:40s} = {value}" for name, value in sorted(metrics.items())]
            print("\n".join([f"***** {split} metrics *****", *lines]))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes metrics as JSON into the run's folder."""
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}_results.json").write_text(json.dumps(dict(metrics), indent=4))
        if combined:
            path = folder / "all_results.json"
            known = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**known, **metrics}, indent=4))

    def end(self) -> None:
        """Closes trackers and leaves the process group."""
        self.accelerator.end_training()
