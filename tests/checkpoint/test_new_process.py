"""A run that goes on in a new process ends bit for bit where the unbroken run ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from memsafe_rl.trainers.grpo import GRPOTrainer
from tests.processes import started
from tests.trainers.helpers import make_trainer, weights

RESUME = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.trainers.helpers import weights
from tests.checkpoint.test_new_process import trainer_in
trainer = trainer_in(Path(sys.argv[1]))
trainer.train(resume_from_checkpoint=True)
torch.save(weights(trainer), Path(sys.argv[1]) / "weights.pt")
"""


def trainer_in(folder: Path, **settings: Any) -> GRPOTrainer:
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return make_trainer(folder, max_steps=7, num_iterations=3, beta=0.05, peft_config=lora, **settings)


class StopAtFour(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 4


@pytest.mark.slow
def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = trainer_in(tmp_path / "whole")
    whole.train()
    broken = trainer_in(tmp_path / "broken", save_strategy="steps", save_steps=4, callbacks=[StopAtFour()])
    broken.train()
    assert not torch.equal(weights(broken), weights(whole))
    resumed = started(RESUME, tmp_path / "broken", log=tmp_path / "log")
    resumed.join()
    assert resumed.exitcode == 0, (tmp_path / "log").read_text()[-2000:]
    assert torch.equal(torch.load(tmp_path / "broken" / "weights.pt"), weights(whole))
